"""`compiled="graph"`: attention seen inside the graphs that inductor makes, without a bit of training changed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests import zoo
from tests.compiling import (
    NOISE,
    a_function,
    each_layer,
    each_layer_replaced,
    learn,
    normed_tower,
    sample,
    states,
    tower,
    whole,
)
from tests.models import B, E, H, Mixer, T, Tower, layer_of, parts, sampled, tokens
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from attnwatch.hooks.probe import Probe, Reading

pytestmark = pytest.mark.filterwarnings(*NOISE)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def assert_twin(reading: Reading, other: Reading, close: float = 1e-5) -> None:
    """Both routes tell the same of the same layers."""
    assert reading.problems == other.problems == ()
    told, expected = ([(x.name, x.state, x.heads, x.kv_heads, x.qk_norm) for x in r.layers] for r in (reading, other))
    assert told == expected
    np.testing.assert_allclose(reading.values, other.values, rtol=close, atol=close)


def recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


# --- training is not changed ------------------------------------------------------------------------------------------


def train(model: nn.Module, probe: Probe | None, dtype: torch.dtype, cast: bool) -> tuple[list[Tensor], int]:
    """Losses, gradients and weights of a few steps, every second one sampled, and how many graphs were made."""
    counter = CompileCounterWithBackend("inductor")
    call = whole(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    left: list[Tensor] = []
    for n in range(4):
        if probe is not None and n % 2 == 0:
            probe.arm(look=n == 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = learn(call, tokens(seed=n).to(dtype))
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if probe is not None and n % 2 == 0:
            reading = probe.finish()
            assert (set(states(reading).values()), reading.problems) == ({"verified"}, ())
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *(p.detach() for p in model.parameters())], counter.frame_count


@pytest.mark.parametrize(
    ("make", "dtype", "cast"),
    [
        (normed_tower, torch.float32, False),
        (normed_tower, torch.float32, True),
        (lambda: tower().bfloat16(), torch.bfloat16, False),
        (lambda: tower(wrap=recomputed), torch.float32, False),
    ],
    ids=["float32", "autocast", "bfloat16", "checkpoints"],
)
def test_every_bit_of_training_is_as_unwatched(make: Any, dtype: torch.dtype, cast: bool, probes: Any) -> None:
    """Losses, gradients and weights; with one graph without a break, not made again when samples begin or end."""
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        model = make()
        results.append(train(model, probes(model) if watched else None, dtype, cast))
    (unwatched, frames), (watched_run, watched_frames) = results
    assert frames == watched_frames == 1
    assert all(torch.equal(a, b) for a, b in zip(unwatched, watched_run, strict=True))


# --- the same numbers as the eager route ------------------------------------------------------------------------------


def test_numbers_equal_those_of_the_eager_route(probes: Any) -> None:
    """Key heads too, though the compiler repeats keys for the kernel; with weights looked at and without."""
    model = normed_tower()
    call, probe = whole(model, fullgraph=True), probes(model)
    expected = sampled(normed_tower(), tokens())
    assert [(layer.kv_heads, layer.qk_norm) for layer in expected.layers] == [(2, "rms per head")]
    assert_twin(sample(probe, call, tokens()), expected)
    again = sample(probe, call, tokens(), look=False)
    measured = [m for m in range(len(expected.values)) if np.isfinite(again.values[m]).all()]
    assert len(measured) > 8
    np.testing.assert_allclose(again.values[measured], expected.values[measured], rtol=1e-5, atol=1e-5)


def test_autocast(probes: Any) -> None:
    """Weights are those before the cast, as the eager route sees them; logits are of the kernel's half precision."""
    model = normed_tower()
    with torch.autocast("cpu", torch.bfloat16):
        expected = sample(Probe(model, rows=None, sequences=1000), model, tokens())
        reading = sample(probes(model), whole(model), tokens())
    assert_twin(reading, expected, close=2e-2)
    assert layer_of(reading, "layers.0").dtype == "bfloat16"
    assert layer_of(reading, "layers.0").note.startswith("W_q = q_proj.weight (whole), W_k = k_proj.weight (whole); ")


def masked(mask: Tensor) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)


def test_masks_and_scales(probes: Any) -> None:
    """A boolean mask reaches the kernel as a float one with -inf."""
    padding = torch.arange(T) < torch.tensor([T, 4, 3])[:, None, None, None]
    slopes = -(torch.arange(T)[:, None] - torch.arange(T)).abs() * torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, H, 1, 1)
    model = Tower(*(Mixer(parts(kv=1), masked(mask)) for mask in (padding, slopes))).train()
    expected = sampled(model, tokens())
    assert_twin(sample(probes(model), whole(model), tokens()), expected)


class Encoder(nn.Module):
    """torch's own layers: a self-attention with padding, a cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(E, H, E, dropout=0.0, batch_first=True)
        for name in ("norm1", "norm2"):  # much to compile, nothing to see
            setattr(self.layer, name, nn.Identity())
        self.cross = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.arange(T) >= torch.tensor([T, 4, 3])[:, None]
        y = self.layer(x, src_key_padding_mask=hidden)
        out: Tensor = self.cross(y, x[:, :5], x[:, :5], need_weights=False)[0]
        return out


def test_torchs_own_layers(probes: Any) -> None:
    torch.manual_seed(0)
    model = Encoder().train()
    expected = sampled(model, tokens())
    probe, call = probes(model), whole(model, fullgraph=True)
    sample(probe, call, tokens())
    assert probe.due  # which part of the packed weight makes the keys was found, and is used from now on
    assert_twin(sample(probe, call, tokens()), expected)


@pytest.mark.filterwarnings(*zoo.NOISE)
def test_a_model_of_transformers(probes: Any) -> None:
    """Rotary embedding and a mask that come from outside of the graph, grouped keys."""
    model = zoo.build("Llama", "sdpa")
    inputs = zoo.inputs("Llama")

    def run(probe: Probe) -> Reading:
        probe.arm(look=True)
        model(**inputs)[0].sum().backward()
        return probe.finish()

    expected = run(Probe(model, rows=None, sequences=1000))
    for layer in model.model.layers:
        layer.self_attn.compile()
    assert_twin(run(probes(model)), expected)


def test_data_parallel(probes: Any) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(normed_tower())
        assert_twin(sample(probes(model), whole(model), tokens()), sampled(normed_tower(), tokens()))
    finally:
        dist.destroy_process_group()


# --- which layer a call belongs to ------------------------------------------------------------------------------------


class Broken(Tower):
    """With a graph break between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: tower(wrap=recomputed), each_layer),
        (lambda: tower(wrap=recomputed), each_layer_replaced),
        (lambda: Broken(*tower().layers).train(), a_function),
    ],
    ids=["each layer", "each layer replaced", "a function with breaks"],
)
def test_equal_layers_that_share_a_graph_are_told_apart(make: Any, way: Any, probes: Any) -> None:
    """Also around the graphs: micro-batches, an evaluation in between, checkpoints."""
    expected = sampled(tower(), tokens())
    model = make()
    call, probe = way(model), probes(model)
    probe.arm(look=True)
    learn(call, tokens()[:1])
    model.eval()
    with torch.no_grad():
        call(3 * tokens()[:1])
    model.train()
    learn(call, tokens()[1:])
    assert_twin(probe.finish(), expected)


def test_a_layer_called_twice_in_a_graph_is_two(probes: Any) -> None:
    layer = Mixer(parts(kv=2))
    model = Tower(layer, layer).train()
    expected = sampled(model, tokens())
    assert expected.measured == ("layers.0", "layers.0#1")
    assert_twin(sample(probes(model), whole(model), tokens()), expected)


def test_two_lengths_with_dynamic_shapes(probes: Any) -> None:
    model, counter = Tower(Mixer(parts(kv=2))).train(), CompileCounterWithBackend("inductor")
    call, probe = whole(model, backend=counter, dynamic=True), probes(model)
    for length in (T, T + 4, T):
        expected = sampled(model, tokens(B, length, E))
        assert_twin(sample(probe, call, tokens(B, length, E)), expected)
    assert counter.frame_count == 1


def test_models_that_share_a_graph_are_told_apart(probes: Any) -> None:
    """A second watched model, and the average of the first's weights, which nobody watches."""

    def another() -> Tower:
        return Tower(*(Mixer(parts(kv=2, seed=seed)) for seed in (2, 3))).train()

    one, other = tower(), another()
    average = copy.deepcopy(one)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(2)
    calls = [each_layer(model) for model in (one, other, average)]
    first, second = probes(one), probes(other)
    first.arm(look=True)
    second.arm(look=True)
    for call in calls:
        learn(call, tokens())
    assert_twin(first.finish(), sampled(tower(), tokens()))
    first.close()
    assert_twin(second.finish(), sampled(another(), tokens()))
    assert_twin(sample(second, calls[1], tokens()), sampled(another(), tokens()))
