"""`compiled="graph"` at its limits: what is not seen is said, nothing breaks a compilation, nothing stays behind."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compiling import NAMES, NOISE, Call, learn, sample, states, tower, whole
from tests.models import D, Mixer, Tower, parts, sampled, tokens
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config
from torch._inductor.custom_graph_pass import get_custom_graph_passes

import attnwatch
from attnwatch.hooks import graph, insertion
from attnwatch.hooks.probe import Probe

pytestmark = pytest.mark.filterwarnings(*NOISE)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    config.post_grad_custom_post_pass = None


def one_layer() -> Tower:
    return Tower(Mixer(parts(kv=2))).train()


# --- what is not seen is said -----------------------------------------------------------------------------------------


def not_compiled(model: Any) -> Call:
    called: Call = model
    return called


def by_another_backend(model: Any) -> Call:
    return whole(model, backend="aot_eager")


@pytest.mark.parametrize("way", [not_compiled, by_another_backend])
def test_a_model_without_a_graph_of_inductor_is_named(way: Any, probes: Any) -> None:
    model = tower()
    reading = sample(probes(model), way(model), tokens())
    assert [where for where, _ in reading.problems] == ["model"]
    assert reading.problems[0][1].startswith('no attention call was seen in this step: compiled="graph" sees fused')
    assert reading.problems[0][1].endswith('use compiled="eager"')


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a soft-cap: the compiler fuses what is plainer."""
    return torch.matmul((q @ k.mT * D**-0.5).tanh().softmax(-1), v)


class Attention(Mixer):
    """Named so that one expects attention in it."""


def test_attention_that_is_not_fused_is_named_beside_what_is(probes: Any) -> None:
    model = Tower(Mixer(parts()), Attention(parts(), by_hand)).train()
    probe, call = probes(model), whole(model)
    readings = []
    for look in (True, False):
        probe.arm(look=look)
        with torch.no_grad():  # what a reentrant checkpoint does to the forward of training
            call(tokens())
        readings.append(probe.finish())
    assert states(readings[0]) == {"layers.0": "verified", "layers.1": "uncovered"}
    assert [where for where, _ in readings[0].problems] == ["layers.1"]
    assert readings[0].problems[0][1].endswith('use compiled="eager"')
    assert readings[1].problems == ()  # said once


def test_a_pass_that_fails_lets_the_compilation_go_on(probes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*nodes: Any) -> None:
        raise RuntimeError("a graph of another kind")

    monkeypatch.setattr(insertion, "_behind", fail)
    model = one_layer()
    with config.patch(force_disable_caches=True):
        reading = sample(probes(model), whole(model, fullgraph=True), tokens())
    assert [where for where, _ in reading.problems] == ["compiled graph", "model"]
    assert "a graph of another kind" in reading.problems[0][1]
    assert all(p.grad is not None for p in model.parameters())


def test_a_failure_at_run_time_stays_out_of_the_model(probes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer()
    probe, call = probes(model), whole(model, fullgraph=True)
    with monkeypatch.context() as broken:
        broken.setattr("attnwatch.hooks.graph._norms", lambda module: 1 / 0)
        reading = sample(probe, call, tokens())
    assert [where for where, _ in reading.problems] == ["compiled graph", "model"]
    assert states(sample(probe, call, tokens())) == {"layers.0": "verified"}


class Told:
    """An adapter that names the weights."""

    def match(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, Mixer)

    def weights(self, module: nn.Module) -> tuple[Tensor, Tensor, str]:
        return parts(kv=2).q, parts(kv=2).k, "as told"


def test_an_adapter_names_the_weights() -> None:
    model = one_layer()
    probe = Probe(model, adapters=[Told()], graph=True)
    try:
        reading = sample(probe, whole(model), tokens())
    finally:
        probe.close()
    assert [layer.note[:8] for layer in reading.layers] == ["as told;"]


# --- beginning and end ------------------------------------------------------------------------------------------------


def hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_compiled_model_is_compiled_anew_once_and_never_again(tmp_path: Path) -> None:
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
    assert [(layer.name, layer.state) for layer in monitor.coverage] == [(name, "verified") for name in NAMES]
    run = attnwatch.open_run(tmp_path / "run")
    assert (run.steps.tolist(), run.header["options"]["compiled"]) == ([0, 2], "graph")
    learn(call, tokens())
    assert counter.frame_count == 2
    assert config.post_grad_custom_post_pass is None


def test_passes_of_the_users_own_run_and_stay(probes: Any) -> None:
    """One that stood before sees graphs without the operator; after the end it is in no graph to come."""
    graphs: list[str] = []
    passes: list[Any] = [lambda graph: graphs.append(str(graph)), lambda graph: graphs.append(str(graph))]
    config.post_grad_custom_post_pass = passes[0]
    model = one_layer()
    probe, call = probes(model), whole(model)
    probe.arm(look=True)
    config.post_grad_custom_post_pass = [*get_custom_graph_passes(config.post_grad_custom_post_pass), passes[1]]
    learn(call, tokens())
    assert probe.finish().measured == ("layers.0",)
    assert ["attnwatch.see" in graph for graph in graphs] == [False, True, False, False]  # forward, backward
    probe.close()
    assert config.post_grad_custom_post_pass == passes
    torch._dynamo.reset()
    learn(call, tokens())
    assert ["attnwatch.see" in graph for graph in graphs[4:]] == [False] * 4


def test_the_compilers_modes_and_copies_of_the_model(probes: Any) -> None:
    """A mode makes the compiler copy its configuration, our pass included; a copy of the model is not watched."""
    model = one_layer()
    expected = sampled(model, tokens())
    probe = probes(model)
    probe.arm(look=True)
    learn(whole(model, mode="reduce-overhead"), tokens())
    learn(whole(copy.deepcopy(model)), 3 * tokens())
    np.testing.assert_allclose(probe.finish().values, expected.values, rtol=1e-5, atol=1e-5)


def test_weights_that_stand_where_those_of_another_layer_stood(probes: Any) -> None:
    """As sharded ones do, which are whole in turn while their layer runs, and are given the same memory for it."""
    model = tower()
    route = probes(model)._graph
    route._look_around()
    first, second = (layer.get_submodule("q_proj").weight for layer in model.layers)
    first.data, second.data = torch.empty_like(first), first.data

    def layer_of(weight: Tensor) -> Any:
        q = torch.ones(1, 1, 1, 1)
        return route._layer_of(graph.Call(q, q, q, q, None, None, False, False, [], [], [], [], [weight], [], 0))

    assert [layer_of(second), layer_of(first)] == [NAMES[1], NAMES[0]]


def test_what_is_no_longer_watched_is_freed(probes: Any) -> None:
    """Also when nobody closed the probe: the pass then inserts nothing, until another stands."""
    model = one_layer()
    probe = Probe(model, graph=True)
    assert sample(probe, whole(model), tokens()).measured == ("layers.0",)
    freed = weakref.ref(model), weakref.ref(probe)
    del model, probe
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in freed] == [None, None]
    model = one_layer()
    call = whole(model)
    learn(call, tokens())
    assert sample(probes(model), call, tokens()).measured == ("layers.0",)


def test_wrong_use_is_said_in_one_line(tmp_path: Path) -> None:
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
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.startswith("expected torch with a list of passes in torch._inductor.config.post_grad_custom")
    assert run.stdout.endswith('update torch or use compiled="eager"\n')
    assert not (tmp_path / "run").exists()
