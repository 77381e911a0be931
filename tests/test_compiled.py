"""Compiled models whose sampled steps run eagerly: everything is seen, and the compiled graphs stay as they were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests import zoo
from tests.compiling import NAMES, NOISE, WAYS, each_layer, learn, sample, states, tower, whole
from tests.models import B, E, Mixer, T, Tower, causal, parts, sampled, tokens
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attnwatch
from attnwatch.hooks.probe import Probe, Reading

pytestmark = pytest.mark.filterwarnings(*NOISE)
VERIFIED = dict.fromkeys(NAMES, "verified")


def stance() -> str:
    name: str = torch._dynamo.eval_frame._stance.stance
    return name


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert stance() == "default"


def twin(reading: Reading, other: Reading) -> None:
    assert reading.measured == other.measured
    np.testing.assert_array_equal(reading.values, other.values)


# --- every way to compile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["before the first call", "after the first call"])
@pytest.mark.parametrize("way", WAYS)
def test_everything_is_seen_and_nothing_is_compiled_anew(way: Any, late: bool) -> None:
    """Hooks registered after a compiled call never fire, and those before it record nothing: not so on a sampled step.
    The steps between use the graphs that were there."""
    expected = sampled(tower(), tokens())
    model, counter = tower(), CompileCounterWithBackend("aot_eager")
    probe = Probe(model, rows=None, sequences=1000)
    if late:
        call = way(model, backend=counter, fullgraph=True)
        learn(call, tokens())
        probe.arm(look=True)
    else:
        probe.arm(look=True)
        call = way(model, backend=counter, fullgraph=True)
    learn(call, tokens())
    reading = probe.finish()
    assert (states(reading), reading.problems) == (VERIFIED, ())
    twin(reading, expected)
    learn(call, tokens())
    frames = counter.frame_count
    assert frames > 0
    for look in (False, True):
        assert sample(probe, call, tokens(), look=look).problems == ()
        learn(call, tokens())
    assert counter.frame_count == frames


def test_hooks_of_others_keep_to_what_they_did() -> None:
    """A hook registered after the first compiled call does not fire in compiled steps; ours needs no such hook."""
    model, fired = tower(), []
    call = whole(model, backend="aot_eager")
    learn(call, tokens())
    with_hook = model.layers[0].register_forward_hook(lambda *_: fired.append(1))
    learn(call, tokens())
    assert fired == []
    assert states(sample(Probe(model), call, tokens())) == VERIFIED
    assert fired == [1]
    learn(call, tokens())
    assert fired == [1]
    with_hook.remove()


def test_steps_between_samples_have_the_bits_of_an_unwatched_run() -> None:
    """With the code that inductor makes."""

    def between(watched: bool) -> list[Tensor | None]:
        torch._dynamo.reset()
        model = tower()
        call, probe = whole(model), Probe(model)
        found: list[Tensor | None] = []
        for n in range(4):
            model.zero_grad()
            if n % 2:
                found += [learn(call, tokens(seed=n)), *(p.grad for p in model.parameters())]
            elif watched:
                sample(probe, call, tokens(seed=n))
            else:
                learn(call, tokens(seed=n))
        return found

    pairs = list(zip(between(True), between(False), strict=True))
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", [whole, each_layer])
def test_checkpoints_inside_and_around_graphs_count_once(way: Any, reentrant: bool) -> None:
    def wrap(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        return out

    x = tokens().requires_grad_()
    model = tower(wrap=wrap)
    call = way(model, backend="aot_eager")
    learn(call, x)
    probe = Probe(model, rows=None, sequences=1000)
    reading = sample(probe, call, x)
    twin(reading, sampled(tower(), x))


def test_two_lengths_with_dynamic_shapes() -> None:
    model, counter = tower(), CompileCounterWithBackend("aot_eager")
    call, probe = whole(model, backend=counter, dynamic=True), Probe(model, rows=None, sequences=1000)
    for length in (T, T + 4):
        learn(call, tokens(B, length, E))
    frames = counter.frame_count
    for length in (T, T + 4):
        twin(sample(probe, call, tokens(B, length, E)), sampled(tower(), tokens(B, length, E)))
        learn(call, tokens(B, length, E))
    assert counter.frame_count == frames


@pytest.mark.parametrize("inside", [True, False], ids=["compiled inside", "compiled outside"])
def test_data_parallel(inside: bool) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = tower()
        wrapped = DistributedDataParallel(whole(model, backend="aot_eager") if inside else model)
        call = wrapped if inside else whole(wrapped, backend="aot_eager")
        probe = Probe(wrapped, rows=None, sequences=1000)
        for _ in range(2):
            twin(sample(probe, call, tokens()), sampled(tower(), tokens()))
            learn(call, tokens())
    finally:
        dist.destroy_process_group()


def test_reduced_overhead_and_a_compiled_loss_and_optimizer(tmp_path: Any) -> None:
    """A compiled `optimizer.step` would trace the hook that counts steps."""
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    call = whole(model, mode="reduce-overhead")
    loss_of = torch.compile(lambda y: y.square().mean(), backend="aot_eager")
    advance = torch.compile(optimizer.step, backend="aot_eager")
    with attnwatch.watch(model, run=tmp_path / "run", every=2, optimizer=optimizer, report=False) as monitor:
        for _ in range(4):
            loss_of(call(tokens())).backward()
            advance()
            optimizer.zero_grad()
    assert monitor.problems == []
    assert attnwatch.open_run(tmp_path / "run").steps.tolist() == [0, 2]
    assert [layer.state for layer in monitor.coverage] == ["verified", "verified"]


@pytest.mark.filterwarnings(*zoo.NOISE)
@pytest.mark.parametrize("late", [False, True], ids=["before the first call", "after the first call"])
def test_a_model_of_transformers(late: bool) -> None:
    """Its attention interface, looked up inside of a graph, would keep the function it found when compiled."""
    model = zoo.build("Llama", "sdpa").train()
    inputs = zoo.inputs("Llama")
    call, probe = whole(model, backend="aot_eager"), Probe(model)
    if late:
        call(**inputs)[0].sum().backward()
    for _ in range(2):
        probe.arm(look=True)
        call(**inputs)[0].sum().backward()
        reading = probe.finish()
        names = [f"model.layers.{n}.self_attn" for n in range(2)]
        assert (states(reading), reading.problems) == (dict.fromkeys(names, "verified"), ())
        call(**inputs)[0].sum().backward()


# --- the user's own stance --------------------------------------------------------------------------------------------


def test_the_users_stance_comes_back_after_every_sample_and_at_the_end(tmp_path: Any) -> None:
    model = tower()
    call = whole(model, backend="aot_eager")
    with torch.compiler.set_stance("eager_on_recompile"):
        with attnwatch.watch(model, run=tmp_path / "run", every=2, report=False) as monitor:
            seen = []
            for _ in range(3):
                seen.append(stance())
                learn(call, tokens())
                monitor.step()
            assert seen == ["force_eager", "eager_on_recompile", "force_eager"]
        assert stance() == "eager_on_recompile"
    assert monitor.problems == []


def test_the_stance_comes_back_after_an_exception_in_the_forward(tmp_path: Any) -> None:
    """With the step that it belongs to, or with the run."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) == 1:
            raise RuntimeError("a batch of one")
        return causal(q, k, v)

    model = Tower(Mixer(parts(), attend)).train()
    call = whole(model, backend="aot_eager")
    monitor = attnwatch.watch(model, run=tmp_path / "run", every=2, report=False)
    with pytest.raises(RuntimeError, match="a batch of one"):
        call(tokens(1, T, E))
    learn(call, tokens())
    monitor.step()
    assert stance() == "default"
    assert [layer.state for layer in monitor.coverage] == ["verified"]
    monitor.close()
    with (
        pytest.raises(RuntimeError, match="a batch of one"),
        attnwatch.watch(model, run=tmp_path / "other", report=False),
    ):
        call(tokens(1, T, E))
    assert stance() == "default"


def test_two_watched_models_share_the_stance() -> None:
    """Samples that overlap: the last one to end restores what there was."""
    one, other = Probe(tower()), Probe(tower())
    one.arm(look=True)
    other.arm(look=True)
    one.finish()
    assert stance() == "force_eager"
    other.model(tokens()).sum().backward()
    assert states(other.finish()) == VERIFIED
    assert stance() == "default"


def test_a_stance_set_while_the_step_runs_is_named_and_stays() -> None:
    """The graph is then compiled with our hooks standing, which do nothing in it: no break, no error, a loud problem;
    and that they do nothing is not remembered."""
    model = tower()
    probe = Probe(model)
    probe.arm(look=True)
    torch.compiler.set_stance("eager_on_recompile")
    torch.compiler.set_stance("default")
    learn(whole(model, backend="aot_eager", fullgraph=True), tokens())
    reading = probe.finish()
    assert stance() == "default"
    assert [where for where, _ in reading.problems] == ["model"]
    assert "set_stance was called while the step ran; call it before watch()" in reading.problems[0][1]
    assert states(sample(probe, whole(model, backend="aot_eager"), tokens())) == VERIFIED


def test_a_dropped_model_is_freed() -> None:
    model = tower()
    probe, call = Probe(model), whole(model, backend="aot_eager")
    sample(probe, call, tokens())
    learn(call, tokens())
    freed = weakref.ref(model)
    del model, probe, call
    torch._dynamo.reset()
    gc.collect()
    assert freed() is None
