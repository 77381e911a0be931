"""What one optimizer step did to `W_q^T W_k`: worked values, the product formed outright, and real steps of a probe."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tests import reference
from tests.devices import Watch
from tests.models import D, H, Heads, Mixer, Model, causal, layer_of, linear, parts, separate, step, tokens, values_of
from tests.test_spectrum import normal
from torch import Tensor, nn

import attnwatch
from attnwatch.hooks import layers
from attnwatch.hooks import probe as probes
from attnwatch.hooks.probe import Probe, Reading
from attnwatch.hooks.update import UPDATE, update

NAMES = [s.name for s in UPDATE]


def found(*weights: Tensor) -> dict[str, list[float]]:
    return dict(zip(NAMES, update(*weights).tolist(), strict=True))


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "in_q", "in_k", "size"),
    [
        (1, 1, 1, 1, 1, 0.1), (4, 4, 8, 32, 32, 1e-3), (6, 2, 5, 40, 40, 1e-2), (4, 1, 8, 24, 24, 1e-6),
        (2, 2, 16, 40, 23, 1.0), (2, 2, 12, 5, 5, 0.3), (4, 2, 12, 7, 30, 1e-3), (2, 1, 6, 9, 9, 30.0),
        (2, 2, 8, 16, 16, 1e-3), (4, 2, 8, 16, 40, 1e-3), (2, 1, 6, 13, 12, 1e-3), (2, 2, 8, 8, 8, 1e-3),
    ],
)  # fmt: skip
def test_agrees_with_the_change_formed_outright(
    heads: int, kv_heads: int, d: int, in_q: int, in_k: int, size: float
) -> None:
    """Grouped heads, cross-attention, heads wider than their input, half as wide; steps of all sizes, one head less."""
    w_q, w_k = normal(heads, d, in_q).float(), normal(kv_heads, d, in_k, seed=1).float()
    dw_q, dw_k = size * normal(heads, d, in_q, seed=2).float(), size * normal(kv_heads, d, in_k, seed=3).float()
    dw_q[0] *= 1e-2
    w_q, w_k, new_q, new_k = (x.double() for x in (w_q, w_k, w_q.double() + dw_q, w_k.double() + dw_k))
    expected = reference.update(*(x.numpy() for x in (w_q, w_k, new_q, new_k)))
    for name, values in found(w_q.float(), w_k.float(), dw_q, dw_k).items():
        assert values == pytest.approx(expected[name], rel=1e-4), name


FALLING = torch.logspace(0, -6, 16, dtype=torch.float64)[:, None]  # condition 1e6, turned below


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("way", ["signs", "decay", "rank 1", "one side"])
def test_steps_of_few_directions_and_weights_of_high_condition(way: str, falling: bool) -> None:
    """Against the change formed outright in float64. Decay and steps of low rank span no new direction."""
    old = [normal(2, 16, 200, seed=seed) for seed in range(2)]
    if falling:
        old = [torch.linalg.qr(normal(16, 16, seed=seed)).Q @ (FALLING * w) for seed, w in enumerate(old)]
    changes = {
        "signs": [1e-3 * normal(2, 16, 200, seed=seed).sign() for seed in (2, 3)],
        "decay": [-1e-3 * w for w in old],
        "rank 1": [1e-3 * normal(2, 16, 1, seed=seed) @ normal(2, 1, 200, seed=seed) for seed in (2, 3)],
        "one side": [1e-3 * normal(2, 16, 1) @ normal(2, 1, 200, seed=2), 0 * old[1]],
    }
    weights, steps = ([w.float() for w in ws] for ws in (old, changes[way]))
    after = [w.double() + dw.double() for w, dw in zip(weights, steps, strict=True)]
    expected = reference.update(*(w.double().numpy() for w in weights), *(w.numpy() for w in after))
    for name, values in found(*weights, *steps).items():
        assert values == pytest.approx(expected[name], rel=1e-3), name


def test_identity_weights_grow_by_hand() -> None:
    """Only queries, by a tenth: the product grows by a tenth in all directions. Both double: from I to 4 I."""
    eye = torch.eye(5)[None]
    assert found(eye, eye, 0.1 * eye, 0 * eye)["update_ratio"] == pytest.approx([0.1])
    assert found(eye, eye, 0.1 * eye, 0 * eye)["update_rank"] == pytest.approx([5])
    assert found(eye, eye, eye, eye)["update_ratio"] == pytest.approx([3])


def test_a_change_in_one_direction_has_rank_one() -> None:
    """W_q^T W_k = diag(4, 1); 2 is added to its second entry."""
    w_q, w_k = torch.diag(torch.tensor([4.0, 1.0]))[None], torch.eye(2)[None]
    values = found(w_q, w_k, torch.diag(torch.tensor([0.0, 2.0]))[None], torch.zeros(1, 2, 2))
    assert values["update_ratio"] == pytest.approx([0.5])
    assert values["update_rank"] == pytest.approx([1])


def test_two_directions_of_known_energy() -> None:
    """First-order changes 3 and 1: shares of energy 0.9 and 0.1."""
    eye = torch.eye(2)[None]
    values = found(eye, eye, torch.diag(torch.tensor([3.0, 0.0]))[None], torch.diag(torch.tensor([0.0, 1.0]))[None])
    assert values["update_rank"] == pytest.approx([math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))])
    assert values["update_ratio"] == pytest.approx([3])


def test_nothing_changed_is_unknown_head_by_head() -> None:
    """A head whose weights stood still has no update; the other one, with frozen keys, has."""
    w_q, w_k, dw_q = (normal(2, 4, 9, seed=n).float() for n in range(3))
    dw_q[0] = 0
    values = found(w_q, w_k, dw_q, torch.zeros_like(w_k))
    for name in NAMES:
        assert [math.isnan(x) for x in values[name]] == [True, False], name


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_number_makes_its_own_heads_unknown(poison: float) -> None:
    """In the change of one key head: the two query heads of its group."""
    w_q, dw_q = normal(4, 4, 9).float(), normal(4, 4, 9, seed=1).float()
    w_k, dw_k = normal(2, 4, 9, seed=2).float(), normal(2, 4, 9, seed=3).float()
    dw_k[1, 2, 3] = poison
    for values in found(w_q, w_k, dw_q, dw_k).values():
        assert [math.isnan(x) for x in values] == [False, False, True, True]


def test_a_product_of_zeros_has_no_ratio() -> None:
    zero, some = torch.zeros(1, 3, 8), normal(1, 3, 8).float()
    assert all(math.isnan(x) for values in found(zero, some, some, some).values() for x in values)


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_the_scale_of_the_weights_does_not_matter(factor: float) -> None:
    weights = [normal(2, 4, 12, seed=n).float() for n in range(4)]
    plain, scaled = update(*weights), update(*(factor * w for w in weights))
    torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=0)


def test_never_forms_the_product() -> None:
    """Nor draws a random number."""
    state = torch.get_rng_state()
    with Watch(syncs=()) as watch:
        update(*(normal(n, 8, 200, seed=n).float() for n in (4, 2, 4, 2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert watch.largest <= 4 * 16 * 200


# --- in a model that trains -------------------------------------------------------------------------------------------

Weights = Callable[[], tuple[Tensor, Tensor]]


def trained(model: nn.Module, probe: Probe, skip: bool = False) -> Reading:
    """A sampled step of Adam; the probe finishes after it, as `monitor.step` does."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    probe.arm(look=True)
    model(tokens()).square().sum().backward()
    if not skip:
        optimizer.step()
    return probe.finish()


def assert_update(model: nn.Module, weights: Weights, gains: tuple[Any, Any] = (1.0, 1.0), name: str = "mix") -> None:
    """The layer's update is that of its weights `([H, d, in], [Hk, d, in])` over the step."""

    def now() -> list[NDArray[np.float64]]:
        return [(w.detach() * g).double().numpy().copy() for w, g in zip(weights(), gains, strict=True)]

    probe = Probe(model.train(), rows=None)
    before = now()
    reading = trained(model, probe)
    if probe.due:
        before = now()
        reading = trained(model, probe)
    assert layer_of(reading, name).state == "verified"
    for metric, expected in reference.update(*before, *now()).items():
        np.testing.assert_allclose(values_of(reading, name)[metric], expected, rtol=1e-3, err_msg=metric)


@pytest.mark.parametrize("kv", [H, 2, 1])
def test_separate_projections(kv: int) -> None:
    mixer = Mixer(parts(kv, bias=True))
    assert_update(Model(mixer), lambda: (by_head(mixer.q_proj.weight), by_head(mixer.k_proj.weight)))


def by_head(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (-1, D))


def test_a_fused_projection() -> None:
    weights = parts()

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = layer.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return q, k, v

    fused = linear(torch.cat([w.flatten(0, 1) for w in (weights.q, weights.k, weights.v)]))
    assert_update(
        Model(Mixer(weights, split=split, modules={"qkv": fused})),
        lambda: (by_head(fused.weight)[:H], by_head(fused.weight)[H : 2 * H]),
    )


def test_torchs_own_module() -> None:
    """The projections are slices of one parameter that the call names."""

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attn = nn.MultiheadAttention(24, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attn(x, x, x, need_weights=False)[0]
            return out

    caller = Caller()
    weight = caller.attn.in_proj_weight
    assert_update(Model(caller), lambda: (by_head(weight)[:H], by_head(weight)[H : 2 * H]), name="mix.attn")


def test_the_gain_of_a_norm_is_held() -> None:
    """The gain of the forward is folded into the weights before and after the step."""

    def normed(layer: Any, x: Tensor) -> Heads:
        q, k, v = separate(layer, x)
        return layer.q_norm(q), layer.k_norm(k), v

    norms = {name: nn.RMSNorm(D) for name in ("q_norm", "k_norm")}
    with torch.no_grad():
        for seed, norm in enumerate(norms.values()):
            norm.weight.copy_(1 + normal(D, seed=seed).abs())
    mixer = Mixer(parts(), causal, normed, norms)
    gains = tuple(norm.weight.detach().clone()[:, None] for norm in norms.values())
    assert_update(Model(mixer), lambda: (by_head(mixer.q_proj.weight), by_head(mixer.k_proj.weight)), gains)


def test_a_step_that_was_skipped_changed_nothing() -> None:
    """As a loss scaler does: the spectrum is known, an update is not."""
    model = Model(Mixer(parts())).train()
    values = values_of(trained(model, Probe(model), skip=True))
    assert np.isfinite(values["qk_rank"]).all()
    for name in NAMES:
        assert np.isnan(values[name]).all(), name


def test_weights_that_are_made_in_the_forward_have_no_update() -> None:
    """A low-rank product is no parameter; the spectrum is known."""

    class Product(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, 1.0 * self.weight)

    mixer = Mixer(parts())
    mixer.q_proj.__class__ = Product
    mixer.q_proj.bias = None
    model = Model(mixer).train()
    values = values_of(trained(model, Probe(model)))
    assert np.isfinite(values["qk_rank"]).all()
    assert np.isnan(values["update_ratio"]).all()


def test_a_weight_that_was_freed_is_not_read() -> None:
    """A sharded parameter is whole only in forward and backward."""
    model = Model(Mixer(parts())).train()
    probe = Probe(model)
    probe.arm(look=True)
    model(tokens()).square().sum().backward()
    model.mix.k_proj.weight.untyped_storage().resize_(0)  # type: ignore[union-attr, operator]
    reading = probe.finish()
    assert reading.problems == ()
    values = values_of(reading)
    assert np.isfinite(values["qk_rank"]).all()
    assert np.isnan(values["update_ratio"]).all()


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the queries and keys of one of two layers: 2 * 24 * 24 numbers of 4 bytes."""
    monkeypatch.setattr(probes, "KEPT", 2 * 24 * 24 * 4)
    model = nn.Sequential(Model(Mixer(parts())).mix, Model(Mixer(parts(seed=1))).mix).train()
    probe = Probe(model)
    for _ in range(2):
        reading = trained(model, probe)
        assert [bool(np.isfinite(values_of(reading, name)["update_ratio"]).all()) for name in "01"] == [True, False]


def test_a_wide_layer_is_compared_in_every_fourth_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its values over all heads are. This one is 24 wide; samples between the looks do not count."""
    monkeypatch.setattr(layers, "WHOLE_ALWAYS", H * D - 1)
    model = Model(Mixer(parts())).train()
    probe = Probe(model)
    readings = []
    for _ in range(9):
        readings.append(trained(model, probe))
        step(probe, model, tokens(), look=False)
    for name in (*NAMES, "layer_energy_top10", "layer_directions_90"):
        known = [bool(np.isfinite(values_of(reading)[name]).all()) for reading in readings]
        assert known == [True, False, False, False] * 2 + [True], name
    assert all(np.isfinite(values_of(reading)["qk_rank"]).all() for reading in readings)


def test_accumulated_gradients_are_one_step() -> None:
    """Weights are compared over the optimizer's step, whatever the number of micro-batches."""
    mixer = Mixer(parts())
    model = Model(mixer).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = [by_head(p.weight).detach().double().numpy().copy() for p in (mixer.q_proj, mixer.k_proj)]
    probe = Probe(model)
    probe.arm(look=True)
    for seed in range(3):
        model(tokens(seed=seed)).square().sum().backward()
    optimizer.step()
    values = values_of(probe.finish())
    after = [by_head(p.weight).detach().double().numpy() for p in (mixer.q_proj, mixer.k_proj)]
    for metric, expected in reference.update(*before, *after).items():
        np.testing.assert_allclose(values[metric], expected, rtol=1e-3, err_msg=metric)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_monitor_sees_the_step_whoever_counts_it(hooked: bool, tmp_path: Path) -> None:
    """`monitor.step()` after the optimizer's, or the optimizer's own hook. Only where the weights are looked at."""
    model = Model(Mixer(parts())).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counted = optimizer if hooked else None
    run = tmp_path / "run"
    with attnwatch.watch(model, run=run, every=1, spectrum_every=2, optimizer=counted, report=False) as monitor:
        for _ in range(4):
            model(tokens()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    stored = attnwatch.open_run(run)
    assert np.isfinite(stored.metric("update_ratio")).all((1, 2)).tolist() == [True, False, True, False]
