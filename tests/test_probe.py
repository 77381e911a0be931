"""One sampled step of training as it really runs: accumulation, checkpoints, evaluation, autocast, threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests import reference
from tests.models import (
    COMPARED,
    D,
    E,
    H,
    Mixer,
    Model,
    T,
    assert_spectrum,
    assert_statistics,
    causal,
    layer_of,
    parts,
    sampled,
    step,
    tokens,
    values_of,
)
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe


def hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT * D**-0.5).masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf)
    return s.softmax(-1) @ v


class Stack(nn.Module):
    """Two layers; `wrap` calls each: directly or through an activation checkpoint."""

    def __init__(self, wrap: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x), **options: Any) -> None:
        super().__init__()
        self.first, self.second = (Mixer(parts(seed=n, bias=True), **options) for n in (0, 1))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wrap(self.first, x)
        return x + self.wrap(self.second, x)


def twin(reading: Any, other: Any) -> None:
    """Two readings tell the same."""
    assert [layer.name for layer in reading.layers] == [layer.name for layer in other.layers]
    np.testing.assert_allclose(reading.values, other.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", [causal, by_hand])
def test_activation_checkpoints_count_once(reentrant: bool, call: Any) -> None:
    """The recomputation in the backward pass is not a second call, and does not disturb the first."""

    def wrap(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        return out

    x = tokens().requires_grad_()
    reading = sampled(Stack(wrap, call=call), x)
    assert not reading.problems
    assert [(layer.name, layer.state) for layer in reading.layers] == [("first", "verified"), ("second", "verified")]
    twin(reading, sampled(Stack(call=call), x))


def test_micro_batches_are_one_sample() -> None:
    """Means are weighted by rows, maxima are taken over all: as if the batches had been one."""
    model = Stack().train()
    x = tokens(12, T, E)
    probe = Probe(model, rows=None, sequences=100)
    probe.arm(look=True)
    for part in x.split([2, 7, 3]):
        model(part).square().sum().backward()
    merged = probe.finish()
    twin(merged, sampled(Stack(), x))
    q, k, _ = parts(seed=0, bias=True).project(x)
    assert_statistics(merged, q, k, "first", causal=True)


def test_evaluation_in_between_is_not_counted() -> None:
    model = Stack().train()
    probe = Probe(model, rows=None)
    probe.arm(look=True)
    model(tokens()).sum().backward()
    model.eval()
    with torch.no_grad():
        model(100 * tokens(seed=7))
    model.train()
    twin(probe.finish(), sampled(Stack(), tokens()))


def test_training_in_eval_mode_is_named() -> None:
    model = Stack().eval()
    probe = Probe(model)
    reading = step(probe, model, tokens())
    [(where, text)] = reading.problems
    assert where == "model"
    assert "no attention call was seen in this step: the model is in eval mode (call model.train()" in text
    assert [layer.state for layer in reading.layers] == ["uncovered", "uncovered"]
    assert reading.values.shape == (len(METRICS), 0, 0)


@pytest.mark.parametrize("call", [causal, by_hand])
def test_autocast(call: Any) -> None:
    """The layer says in what the attention is computed, and its weights are proved through the rounding."""
    weights = parts(bias=True)
    model = Model(Mixer(weights, call)).train()
    probe = Probe(model, rows=None)
    probe.arm(look=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens()).float().sum().backward()
    reading = probe.finish()
    assert layer_of(reading).dtype == "bfloat16"
    assert_spectrum(reading, weights.q, weights.k)
    close(reading, weights, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("call", [causal, by_hand])
def test_models_of_other_precision(dtype: torch.dtype, call: Any) -> None:
    weights = parts(bias=True)
    model = Model(Mixer(weights, call)).to(dtype)
    reading = sampled(model, tokens().to(dtype))
    assert layer_of(reading).dtype == str(dtype).removeprefix("torch.")
    rounded = [w.to(dtype).float() for w in (weights.q, weights.k)]
    assert_spectrum(reading, *rounded)
    close(reading, weights, rtol=0.05 if dtype != torch.float64 else 1e-5)


def close(reading: Any, weights: Any, rtol: float) -> None:
    q, k, _ = weights.project(tokens())
    expected = reference.attention_statistics(q, k, causal=True)
    for name in COMPARED:
        np.testing.assert_allclose(values_of(reading)[name], expected[name], rtol=rtol, err_msg=name)


def test_a_module_called_twice() -> None:
    """Shared weights: every call of a forward is a layer of its own, in micro-batches too."""
    weights = parts()

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mixer(weights)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.mix(x) + 1)

    model = Shared().train()
    probe = Probe(model, rows=None)
    probe.arm(look=True)
    for part in (tokens(), tokens(seed=2)):
        model(part).square().sum().backward()
    reading = probe.finish()
    assert [layer.name for layer in reading.layers] == ["mix", "mix#1"]
    with torch.no_grad():
        both = torch.cat([tokens(), tokens(seed=2)])
        first, second = both, model.mix(both) + 1
    for name, x in (("mix", first), ("mix#1", second)):
        q, k, _ = weights.project(x)
        assert_statistics(reading, q, k, name, causal=True)
        assert_spectrum(reading, weights.q, weights.k, name)


def test_a_skipped_layer_is_named_once() -> None:
    """It stays in the sample, unmeasured, until it runs again."""
    model = Stack().train()
    probe = Probe(model)
    run = model.wrap
    step(probe, model, tokens())
    model.wrap = lambda layer, x: x if layer is model.second else run(layer, x)
    told = [step(probe, model, tokens()) for _ in range(2)]
    assert told[0].problems == (("second", "gave nothing in this sampled step: it did not run, or was not seen"),)
    assert told[1].problems == ()
    assert np.isnan(told[1].values[:, 1]).all()
    assert not np.isnan(told[1].values[0, 0]).any()
    model.wrap = run
    assert not np.isnan(step(probe, model, tokens()).values[0, 1]).any()


class Interrupted(Mixer):
    """Raises in the middle of its attention when asked to."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.error is not None:
            raise self.error
        return out


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("again", [True, False], ids=["same step", "next step"])
def test_an_interrupted_forward(error: BaseException, again: bool) -> None:
    """What is thrown reaches the trainer; then watching goes on as if nothing had been."""
    mixer = Interrupted(parts())
    model = Model(mixer).train()
    probe = Probe(model, rows=None)
    probe.arm(look=True)
    mixer.error = error
    with pytest.raises(type(error)) as raised:
        model(tokens())
    assert raised.value is error
    mixer.error = None
    if not again:
        probe.finish()
        probe.arm(look=True)
    model(tokens()).sum().backward()
    reading = probe.finish()
    assert [layer.name for layer in reading.layers] == ["mix"]
    assert not _get_current_function_mode_stack()
    assert hooks_in(model) == 0
    q, k, _ = parts().project(tokens())
    assert_statistics(reading, q, k, causal=True)


def test_hooks_stand_only_in_sampled_steps() -> None:
    model = Stack().train()
    probe = Probe(model)
    assert hooks_in(model) == 0
    probe.arm(look=False)
    assert hooks_in(model) == 2 * 3  # before and after the model and each layer; leaves of torch have none
    probe.finish()
    assert hooks_in(model) == 0
    probe.disarm()


def test_a_step_without_a_look_tells_no_spectrum() -> None:
    """Statistics only; a layer first met in such a step asks for a look at the next sample."""
    model = Stack().train()
    probe = Probe(model)
    reading = step(probe, model, tokens(), look=False)
    assert [layer.state for layer in reading.layers] == ["logits_only", "logits_only"]
    assert np.isnan(values_of(reading, "first")["qk_rank"]).all()
    assert not np.isnan(values_of(reading, "first")["entropy"]).any()
    assert probe.due
    assert layer_of(step(probe, model, tokens(), look=True), "first").state == "verified"
    assert not probe.due


def test_two_models_at_once() -> None:
    """Each probe sees its own model only, also where one model is a part of the other, or the same."""
    inner, outer = Mixer(parts(seed=3)), Model(Mixer(parts(seed=4)))
    outer.inner = inner
    whole = nn.Sequential(inner, outer).train()
    probes = [Probe(m, rows=None) for m in (inner, outer, whole, whole)]
    for probe in probes:
        probe.arm(look=True)
    whole(tokens()).sum().backward()
    readings = [probe.finish() for probe in probes]
    names = [[layer.name for layer in reading.layers] for reading in readings]
    assert names[0] == ["Mixer"]
    assert names[2:] == [["0", "1.mix"], ["0", "1.mix"]]
    q, k, _ = parts(seed=3).project(tokens())
    assert_statistics(readings[0], q, k, "Mixer", causal=True)
    assert_statistics(readings[2], q, k, "0", causal=True)
    np.testing.assert_array_equal(readings[2].values, readings[3].values)
    assert "mix" in names[1]


def test_threads() -> None:
    """Forwards at the same time in several threads are micro-batches."""
    model = Stack().train()
    probe = Probe(model, rows=None, sequences=100)
    x = tokens(8, T, E)
    probe.arm(look=True)
    threads = [threading.Thread(target=model, args=(part,)) for part in x.split(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    twin(probe.finish(), sampled(Stack(), x))


def test_functional_call() -> None:
    """Weights handed in from outside are those that are measured."""
    model = Model(Mixer(parts())).train()
    other = parts(seed=5)
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for name in "qk":
        given[f"mix.{name}_proj.weight"] = getattr(other, name).flatten(0, 1).clone().requires_grad_()
    probe = Probe(model, rows=None)
    probe.arm(look=True)
    torch.func.functional_call(model, given, (tokens(),)).sum().backward()
    reading = probe.finish()
    q, k, _ = other.project(tokens())
    assert_statistics(reading, q, k, causal=True)
    assert_spectrum(reading, other.q, other.k)


def test_an_empty_batch_is_no_failure() -> None:
    """Nor are its rows any; beside others it is not noticed, alone it is named."""
    model, x = Stack(), tokens()
    probe = Probe(model, rows=None, sequences=1000)
    for parts_of_batch in ([x, x[:0]], [x[:0]], [x]):
        probe.arm(look=True)
        for part in parts_of_batch:
            model(part).sum().backward()
        reading = probe.finish()
        assert [layer.state for layer in reading.layers] == ["verified", "verified"]
        assert [where for where, _ in reading.problems] == (["model"] if len(parts_of_batch[0]) == 0 else [])
    twin(reading, sampled(Stack(), x))


def test_a_failure_that_passes_costs_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is asked to be looked at again; one that goes on failing is not, or all looks would be for it."""
    model, works = Stack(), Probe._add
    probe = Probe(model)

    def reads(broken: bool) -> Any:
        monkeypatch.setattr(Probe, "_add", _fails_after(works) if broken else works)
        probe.arm(look=probe.due or not probe.layers)
        model(tokens()).sum().backward()
        return probe.finish()

    reads(False)
    assert [layer.state for layer in reads(True).layers] == ["uncovered", "uncovered"]
    assert probe.due
    assert [layer.state for layer in reads(False).layers] == ["verified", "verified"]
    assert not probe.due
    for _ in range(2):
        reads(True)
    assert not probe.due


def _fails_after(works: Any) -> Any:
    def add(probe: Probe, *call: Any) -> None:
        works(probe, *call)
        raise MemoryError

    return add


def test_copies_take_no_hooks_along() -> None:
    """An EMA copy made in a sampled step, or a saved model, tells nothing; the original still does."""
    model = nn.Sequential(nn.Linear(E, E), nn.TransformerEncoderLayer(E, H, 8, batch_first=True)).train()
    probe = Probe(model)
    probe.arm(look=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(tokens()).sum().backward()
    assert not probe._drafts
    model(tokens()).sum().backward()
    assert [layer.name for layer in probe.finish().layers] == ["1.self_attn"]


def test_a_compiled_model_is_seen() -> None:
    """A sampled step runs eagerly; the steps between use the graph that was there before."""
    torch._dynamo.reset()
    frames: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        frames.append(len(inputs))
        return graph.forward

    weights = parts()
    model = Model(Mixer(weights)).train()
    compiled = torch.compile(model, backend=backend)
    compiled(tokens()).sum().backward()
    made = len(frames)
    reading = sampled(compiled, tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k, causal=True)
    compiled(tokens()).sum().backward()
    assert len(frames) == made
    torch._dynamo.reset()
