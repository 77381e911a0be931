"""`compiled="graph"`: attention seen inside the graphs that inductor makes, without a bit of training changed."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests import zoo
from tests.models import B, D, E, H, Mixer, T, Tower, grouped, layer_of, parts, sampled, tokens
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config
from torch._inductor.custom_graph_pass import get_custom_graph_passes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attnwatch
from attnwatch.hooks import insertion
from attnwatch.hooks.probe import Probe, Reading

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:`torch.jit.script_method` is deprecated",
    "ignore:dynamo_pgo force disabled",
    "ignore:Mismatch dtype between input and weight",
)  # the compiler's own, and the norm's under autocast

NAMES = ["layers.0", "layers.1"]
Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert config.post_grad_custom_post_pass is None


@pytest.fixture
def probes() -> Iterator[Callable[[nn.Module], Probe]]:
    """Makes probes that look inside graphs, and closes them."""
    made: list[Probe] = []

    def make(model: nn.Module) -> Probe:
        made.append(Probe(model, rows=None, sequences=1000, graph=True))
        return made[-1]

    yield make
    for probe in made:
        probe.close()


def tower(**options: Any) -> Tower:
    return Tower(grouped(0), grouped(1), **options).train()


def whole(model: Any, **options: Any) -> Call:
    call: Call = torch.compile(model, **options)
    return call


def learn(call: Call, *inputs: Tensor) -> Tensor:
    loss = call(*inputs).float().square().mean()
    loss.backward()
    return loss


def sample(probe: Probe, call: Call, *inputs: Tensor, look: bool = True) -> Reading:
    probe.arm(look=look)
    learn(call, *inputs)
    return probe.finish()


def told(reading: Reading) -> list[tuple[str, str, int, int, str]]:
    return [(x.name, x.state, x.heads, x.kv_heads, x.qk_norm) for x in reading.layers]


def assert_twin(reading: Reading, other: Reading, close: float = 1e-5) -> None:
    """Both routes tell the same of the same layers."""
    assert reading.problems == other.problems == ()
    assert told(reading) == told(other)
    np.testing.assert_allclose(reading.values, other.values, rtol=close, atol=close)


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
            assert {layer.state for layer in reading.layers} == {"verified"}
            assert reading.problems == ()
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *(p.detach() for p in model.parameters())], counter.frame_count


def recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


@pytest.mark.parametrize(
    ("make", "dtype", "cast"),
    [
        (tower, torch.float32, False),
        (tower, torch.float32, True),
        (lambda: Tower(Mixer(parts(kv=2))).bfloat16(), torch.bfloat16, False),
        (lambda: Tower(Mixer(parts(kv=2)), wrap=recomputed), torch.float32, False),
    ],
    ids=["float32", "autocast", "bfloat16", "checkpoints"],
)
def test_every_bit_of_training_is_as_unwatched(make: Any, dtype: torch.dtype, cast: bool, probes: Any) -> None:
    """Losses, gradients and weights; with one graph without a break, not made again when samples begin or end."""
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        model = make().train()
        results.append(train(model, probes(model) if watched else None, dtype, cast))
    (unwatched, frames), (watched_run, watched_frames) = results
    assert frames == watched_frames == 1
    assert all(torch.equal(a, b) for a, b in zip(unwatched, watched_run, strict=True))


# --- the same numbers as the eager route ------------------------------------------------------------------------------


def test_numbers_equal_those_of_the_eager_route(probes: Any) -> None:
    """Key heads too, though the compiler repeats keys for the kernel; with weights looked at and without."""
    model = tower()
    call, probe = whole(model, fullgraph=True), probes(model)
    expected = sampled(tower(), tokens())
    assert [layer.kv_heads for layer in expected.layers] == [2, 2]
    assert_twin(sample(probe, call, tokens()), expected)
    again = sample(probe, call, tokens(), look=False)
    entropy = [m for m in range(len(expected.values)) if np.isfinite(again.values[m]).all()]
    assert len(entropy) > 8
    np.testing.assert_allclose(again.values[entropy], expected.values[entropy], rtol=1e-5, atol=1e-5)


def test_autocast(probes: Any) -> None:
    """Weights are those before the cast, as the eager route sees them; logits are of the kernel's half precision."""

    model = tower()
    with torch.autocast("cpu", torch.bfloat16):
        expected = sample(Probe(model, rows=None, sequences=1000), model, tokens())
        reading = sample(probes(model), whole(model), tokens())
    assert_twin(reading, expected, close=2e-2)
    assert layer_of(reading, "layers.0").dtype == "bfloat16"
    assert layer_of(reading, "layers.0").note.startswith("W_q = q_proj.weight (whole), W_k = k_proj.weight (whole); ")


def masked(mask: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)

    return call


def test_masks_and_scales(probes: Any) -> None:
    """A boolean mask reaches the kernel as a float one with -inf."""
    padding = torch.arange(T) < torch.tensor([T, 4, 3])[:, None, None, None]
    slopes = -(torch.arange(T)[:, None] - torch.arange(T)).abs() * torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, H, 1, 1)
    model = Tower(grouped(0, masked(padding)), grouped(1, masked(slopes))).train()
    expected = sampled(model, tokens())
    assert_twin(sample(probes(model), whole(model), tokens()), expected)


class Encoder(nn.Module):
    """torch's own layers: a self-attention with padding, a cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(E, H, E, dropout=0.0, batch_first=True)
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
    """Rotary embedding, grouped keys, left padding."""
    model, inputs = zoo.build("Llama", "sdpa"), zoo.inputs("Llama")

    def run(probe: Probe, call: Any) -> Reading:
        probe.arm(look=True)
        call(**inputs)[0].sum().backward()
        return probe.finish()

    expected = run(Probe(model, rows=None, sequences=1000), model)
    assert_twin(run(probes(model), whole(model)), expected)


# --- which layer a call belongs to ------------------------------------------------------------------------------------


def each_layer(model: Any) -> Call:
    for layer in model.layers:
        layer.compile(fullgraph=True)
    called: Call = model
    return called


def each_layer_replaced(model: Any) -> Call:
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer)
    called: Call = model
    return called


def a_function(model: Any) -> Call:
    """With a graph break between the layers."""

    def run(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return x

    return whole(run)


@pytest.mark.parametrize("way", [each_layer, each_layer_replaced, a_function])
def test_equal_layers_that_share_a_graph_are_told_apart(way: Any, probes: Any) -> None:
    """Also around the graphs: micro-batches, an evaluation in between, checkpoints."""
    expected = sampled(tower(), tokens())
    model = tower(wrap=recomputed)
    call, probe = way(model), probes(model)
    probe.arm(look=True)
    learn(call, tokens()[:1])
    model.eval()
    learn(call, 3 * tokens()[:1])
    model.train()
    learn(call, tokens()[1:])
    assert_twin(probe.finish(), expected)


class Twice(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_a_layer_called_twice_in_a_graph_is_two(probes: Any) -> None:
    model = Twice(grouped()).train()
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
    one, other = tower(), Tower(grouped(2), grouped(3)).train()
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
    assert_twin(second.finish(), sampled(Tower(grouped(2), grouped(3)), tokens()))
    assert_twin(sample(second, calls[1], tokens()), sampled(Tower(grouped(2), grouped(3)), tokens()))


# --- what is not seen is said -----------------------------------------------------------------------------------------


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((q @ k.mT * D**-0.5).softmax(-1), v)


class Attention(Mixer):
    """Named so that one expects attention in it."""


class Biased(nn.MultiheadAttention):
    """Its bias is learned: for such a one no kernel on a CPU has a gradient."""

    def __init__(self) -> None:
        super().__init__(E, H, batch_first=True)
        self.bias = nn.Parameter(tokens(T, T))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, x, x, attn_mask=self.bias, need_weights=False)[0]
        return out


@pytest.mark.parametrize(
    "compile_",
    [lambda model: model, lambda model: whole(model, backend="aot_eager")],
    ids=["not compiled", "aot_eager"],
)
def test_a_model_without_a_graph_of_inductor_is_named(compile_: Any, probes: Any) -> None:
    model = tower()
    reading = sample(probes(model), compile_(model), tokens())
    assert [where for where, _ in reading.problems] == ["model"]
    assert reading.problems[0][1].startswith('no attention call was seen in this step: compiled="graph" sees fused')
    assert reading.problems[0][1].endswith('use compiled="eager"')


def test_attention_that_is_not_fused_is_named_beside_what_is(probes: Any) -> None:
    model = Tower(Mixer(parts()), Attention(parts(), by_hand), Biased()).train()
    probe, call = probes(model), whole(model)
    reading = sample(probe, call, tokens())
    assert {layer.name: layer.state for layer in reading.layers} == {
        "layers.0": "verified", "layers.1": "uncovered", "layers.2": "uncovered",
    }  # fmt: skip
    assert [where for where, _ in reading.problems] == ["layers.1", "layers.2"]
    assert all(text.endswith('use compiled="eager"') for _, text in reading.problems)
    assert sample(probe, call, tokens()).problems == ()  # said once


def test_a_pass_that_fails_lets_the_compilation_go_on(probes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*nodes: Any) -> None:
        raise RuntimeError("a graph of another kind")

    monkeypatch.setattr(insertion, "_behind", fail)
    model = Tower(Mixer(parts())).train()
    with config.patch(force_disable_caches=True):
        reading = sample(probes(model), whole(model, fullgraph=True), tokens())
    assert [where for where, _ in reading.problems] == ["compiled graph", "model"]
    assert "a graph of another kind" in reading.problems[0][1]
    assert all(p.grad is not None for p in model.parameters())


def test_a_failure_at_run_time_stays_out_of_the_model(probes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tower()
    probe, call = probes(model), whole(model, fullgraph=True)
    monkeypatch.setattr("attnwatch.hooks.graph._norms", lambda module: 1 / 0)
    reading = sample(probe, call, tokens())
    assert [where for where, _ in reading.problems] == ["compiled graph", "model"]
    assert sample(probe, call, tokens(), look=False).measured == tuple(NAMES)


# --- beginning and end ------------------------------------------------------------------------------------------------


def hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_compiled_model_is_compiled_anew_once_and_never_again(tmp_path: Any) -> None:
    """The graphs keep the operator after the end, and the model carries nothing ever."""
    model, counter = tower(), CompileCounterWithBackend("inductor")
    call = whole(model, backend=counter)
    learn(call, tokens())
    with attnwatch.watch(model, run=tmp_path / "run", every=2, report=False, compiled="graph") as monitor:
        for _ in range(4):
            learn(call, tokens())
            assert hooks_in(model) == 0
            monitor.step()
    assert counter.frame_count == 2
    assert monitor.problems == []
    assert [layer.state for layer in monitor.coverage] == ["verified", "verified"]
    run = attnwatch.open_run(tmp_path / "run")
    assert (run.steps.tolist(), run.header["options"]["compiled"]) == ([0, 2], "graph")
    learn(call, tokens())
    assert counter.frame_count == 2


def standing() -> list[Any]:
    return list(get_custom_graph_passes(config.post_grad_custom_post_pass))


def test_a_pass_of_the_users_own_runs_and_stays(probes: Any) -> None:
    """It sees graphs before the operator is in them; after the end there is none in graphs to come."""
    graphs: list[str] = []
    passes: list[Any] = [lambda graph: graphs.append(str(graph)), lambda graph: graphs.append(str(graph))]
    config.post_grad_custom_post_pass = passes[0]
    try:
        model = Tower(Mixer(parts())).train()
        probe, call = probes(model), whole(model)
        probe.arm(look=True)
        config.post_grad_custom_post_pass = [*standing(), passes[1]]
        learn(call, tokens())
        assert probe.finish().measured == ("layers.0",)
        assert ["attnwatch.see" in graph for graph in graphs] == [False, True, False, False]  # forward, backward
        probe.close()
        assert config.post_grad_custom_post_pass == passes
        torch._dynamo.reset()
        learn(call, tokens())
        assert ["attnwatch.see" in graph for graph in graphs[4:]] == [False] * 4
    finally:
        config.post_grad_custom_post_pass = None


def test_the_compilers_modes_and_copies_of_the_model(probes: Any) -> None:
    """A mode makes the compiler copy its configuration, our pass included; a copy of the model is not watched."""
    model = Tower(Mixer(parts())).train()
    expected = sampled(model, tokens())
    probe = probes(model)
    probe.arm(look=True)
    call = whole(model, mode="reduce-overhead")
    learn(call, tokens())
    learn(whole(copy.deepcopy(model)), 3 * tokens())
    assert_twin(probe.finish(), expected)


def test_data_parallel(probes: Any) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(tower())
        assert_twin(sample(probes(model), whole(model), tokens()), sampled(tower(), tokens()))
    finally:
        dist.destroy_process_group()


def test_what_is_no_longer_watched_is_freed() -> None:
    """Also when nobody closed the probe: the pass then inserts nothing more."""
    model = tower()
    probe = Probe(model, graph=True)
    call = whole(model)
    sample(probe, call, tokens())
    freed = weakref.ref(model), weakref.ref(probe)
    del model, probe, call
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in freed] == [None, None]
    last = Probe(tower(), graph=True)
    last.arm(look=False)
    last.close()


def test_wrong_use_is_said_in_one_line(tmp_path: Any) -> None:
    with pytest.raises(attnwatch.UsageError) as found:
        attnwatch.watch(tower(), run=tmp_path / "run", compiled="Graph")
    assert str(found.value) == 'expected compiled to be "eager" or "graph", found \'Graph\''
    code = (
        "import torch, torch._inductor.custom_graph_pass as place; del place.get_custom_graph_passes\n"
        "import attnwatch\n"
        "try:\n"
        f"    attnwatch.watch(torch.nn.MultiheadAttention(4, 2), run={str(tmp_path / 'run')!r}, compiled='graph')\n"
        "except attnwatch.UsageError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.startswith("expected torch with a list of passes in torch._inductor.config.post_grad_custom")
    assert run.stdout.endswith('update torch or use compiled="eager"\n')
    assert not (tmp_path / "run").exists()
