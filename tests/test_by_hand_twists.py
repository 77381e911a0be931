"""Attention written out with a twist: a softmax kept stable by hand, scores that are sums, factored projections, and
what runs after a forward that was interrupted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.models import (
    B,
    D,
    E,
    H,
    Mixer,
    Model,
    T,
    assert_spectrum,
    assert_statistics,
    layer_of,
    parts,
    sampled,
    tokens,
)
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from attnwatch.hooks.probe import Probe

CAUSAL = torch.ones(T, T).tril().bool()
STABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "amax of the row": lambda s: s - s.amax(-1, keepdim=True),
    "max of the row, detached": lambda s: s - s.max(-1, keepdim=True).values.detach(),
    "one maximum for all": lambda s: s - s.max(),
    "in place": lambda s: s.clone().sub_(s.detach().amax(-1, keepdim=True)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grown", [1.0, 100.0])
@pytest.mark.parametrize("how", STABLE)
def test_a_softmax_kept_stable_by_hand(how: str, grown: float, masked: bool) -> None:
    """What is taken from a whole row is no mask, and `logit_max` is that of the logits before."""
    weights = parts()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = STABLE[how](q @ k.mT * (grown * D**-0.5))
        return (s.masked_fill(~CAUSAL, -torch.inf) if masked else s).softmax(-1) @ v

    reading = sampled(Model(Mixer(weights, call)), tokens())
    q, k, _ = weights.project(tokens())
    assert layer_of(reading).state == "verified"
    assert_statistics(reading, q, k, scale=grown * D**-0.5, causal=masked)


FAR = torch.arange(T)[:, None] - torch.arange(T) > 2
CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "far keys scored otherwise": lambda s: torch.where(FAR, 0.5 * s, s),
    "far keys scored alike": lambda s: s.masked_fill(FAR, torch.tensor(0.25)),
    "by the method": lambda s: s.where(~FAR, torch.full((), 0.25)),
}


@pytest.mark.parametrize("how", CHOSEN)
def test_what_takes_the_place_of_scores_hides_only_by_its_value(how: str) -> None:
    weights = parts()
    model = Model(Mixer(weights, lambda q, k, v: CHOSEN[how](q @ k.mT * D**-0.5).softmax(-1) @ v))
    q, k, _ = weights.project(tokens())
    scores = q @ k.mT * D**-0.5
    scores = torch.where(FAR, 0.5 * scores if "otherwise" in how else torch.full_like(scores, 0.25), scores)
    assert_statistics(sampled(model, tokens()), q, k, scores=scores)


@pytest.mark.parametrize("batch", [1, B])
def test_scores_that_are_a_sum_of_two_products(batch: int) -> None:
    """Relative positions as Transformer-XL adds them: `q k + q r`, where r is the same for every sequence."""
    weights = parts()
    relative = tokens(H, T, D, seed=5)
    x = tokens()[:batch]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,hjd->bhij", q, relative)) * D**-0.5
        return s.softmax(-1) @ v

    reading = sampled(Model(Mixer(weights, call)), x)
    q, k, _ = weights.project(x)
    assert not reading.problems
    assert_statistics(reading, q, k, bias=torch.einsum("bhid,hjd->bhij", q, relative.to(q)) * D**-0.5)
    assert_spectrum(reading, weights.q, weights.k)


class Factored(nn.Module):
    """Queries through a bottleneck of `rank` features."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.down, self.up = nn.Linear(E, rank, bias=False), nn.Linear(rank, H * D, bias=False)
        self.k, self.v = nn.Linear(E, H * D, bias=False), nn.Linear(E, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.up(self.down(x)), self.k(x), self.v(x)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_factored_projection_counts_as_the_product_of_its_weights() -> None:
    mix = Factored(rank=3)
    reading = sampled(Model(mix), tokens())
    w_q = (mix.up.weight @ mix.down.weight).unflatten(0, (H, D)).detach()
    assert_spectrum(reading, w_q, mix.k.weight.unflatten(0, (H, D)).detach())


class Stops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_nothing_that_runs_after_an_interrupted_forward_is_measured() -> None:
    """No hook tells of the end of such a forward; an evaluation and foreign code may follow before the next step."""
    model = nn.Sequential(Mixer(parts()), Stops()).train()
    probe = Probe(model, rows=None)
    probe.arm(look=True)
    with pytest.raises(KeyboardInterrupt):
        model(tokens())
    F.scaled_dot_product_attention(*(tokens(2, 6, 9, 4, seed=i) * 100 for i in range(3)))
    Mixer(parts(seed=9))(tokens())
    model.eval()
    model[0](tokens())
    model.train()
    assert not _get_current_function_mode_stack()
    reading = probe.finish()
    assert [layer.name for layer in reading.layers] == ["0"]
    q, k, _ = parts().project(tokens())
    assert_statistics(reading, q, k, "0", causal=True)


def test_masks_that_leave_nothing_to_see_make_no_healthy_layer() -> None:
    """What the code hides from every row is uncovered, not a layer without numbers that looks verified."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.mT * D**-0.5).masked_fill(torch.ones(T, T).bool(), -1e9)
        return s.softmax(-1) @ v

    layer = layer_of(sampled(Model(Mixer(parts(), call)), tokens()))
    assert layer.state == "uncovered"
    assert "no row sees any key" in layer.note
