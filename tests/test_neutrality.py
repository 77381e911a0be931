"""Watching changes nothing: not training, not the model's state, not its copies; and nothing waits for the device."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.devices import Watch
from tests.recipes import BATCH, LENGTH, RECIPES, STEPS, TOKENS, Attention, Decoder, fused
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import _get_current_function_mode_stack

import attnwatch
from attnwatch import Monitor
from attnwatch.hooks.compiled import EagerStep
from attnwatch.hooks.huggingface import Interface
from attnwatch.hooks.probe import Probe


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(partial(Attention, fused))


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(TOKENS, (BATCH, length), generator=torch.Generator().manual_seed(1))


def watched(model: nn.Module, place: Path) -> Monitor:
    """Its hooks stand: the first step is a sampled one."""
    return attnwatch.watch(model, run=place / "run", every=1, report=False)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_the_same_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Losses, gradients, weights, buffers, optimizer state and random state, sampled at every step and at every other
    one; and the samples were really taken, of every layer."""
    recipe = RECIPES[name]
    expected, _ = recipe.train(tmp_path, None)
    for every in (1, 2):
        left, monitor = recipe.train(tmp_path / str(every), every)
        assert len(left) == len(expected)
        assert [i for i, (a, b) in enumerate(zip(left, expected, strict=True)) if not _same_bits(a, b)] == []
        assert monitor is not None
        assert monitor.problems == []
        assert {layer.state for layer in monitor.coverage} <= {"verified", "logits_only"}
        steps = attnwatch.open_run(monitor.run).steps.tolist()
        taken = STEPS - 1 if "skipped" in name else STEPS  # a step that the loss scale skips goes into the next sample
        assert steps == list(range(0, taken, every))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also NaN against NaN, which a step that overflowed has in its gradients."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """One number drawn from the random state by an output is seen."""

    class Draws:
        def write(self, update: Any) -> None:
            torch.rand(1)

        def close(self) -> None: ...

    watch = attnwatch.watch
    recipe = RECIPES["fused"]
    expected, _ = recipe.train(tmp_path, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnwatch, "watch", lambda *a, **k: watch(*a, **k, outputs=[Draws()]), raising=False)
        left, _ = recipe.train(tmp_path / "watched", 2)
    assert not all(_same_bits(a, b) for a, b in zip(left, expected, strict=True))


# --- the device -------------------------------------------------------------------------------------------------------


MODELS = (
    "fused",
    "by hand",
    "by hand, overwriting",
    "nn.TransformerEncoder",
    "nn.Transformer",
    "grouped, rotary, QK-norm",
)


@pytest.mark.parametrize("look", [True, False], ids=["weights too", "activations"])
@pytest.mark.parametrize("name", MODELS)
def test_no_hook_waits_for_the_device(name: str, look: bool) -> None:
    torch.manual_seed(0)
    model = RECIPES[name].model().train()
    probe = Probe(model, rows=4, sequences=2)
    probe.arm(look=look)
    with Watch():
        loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
        loss.backward()
    reading = probe.finish()
    assert reading.problems == ()
    assert {layer.name for layer in reading.layers} == set(reading.measured)


@pytest.mark.parametrize("look", [True, False], ids=["weights too", "activations"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_read_before_the_one_copy(name: str, look: bool) -> None:
    """A meta tensor holds no data: reading one anywhere raises. Only the copy to the host does."""
    with torch.device("meta"):
        model = RECIPES[name].model().train()
        probe = Probe(model, rows=4, sequences=2)
        probe.arm(look=look)
        model(torch.zeros(BATCH, LENGTH, dtype=torch.int64)).sum().backward()
        with pytest.raises(NotImplementedError, match="meta tensor"):
            probe.finish()
        assert probe._problems == []  # not even a layer that could not be completed
        probe.arm(look=False)
        assert [where for where, _ in probe.finish().problems] == ["model"]  # no forward ran in this last step


@pytest.mark.parametrize(
    "read",
    [
        Tensor.item,
        Tensor.nonzero,
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        bool,
        torch.linalg.eigvalsh,
        torch.linalg.svdvals,
        torch.linalg.cholesky,
    ],
)
def test_a_wait_is_seen(read: Callable[[Tensor], object]) -> None:
    """The check above can fail."""
    with Watch(), pytest.raises(AssertionError, match="waits for the device"):
        read(torch.ones(1, 1))


# --- the model --------------------------------------------------------------------------------------------------------


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What every module of a model holds, containers by their content."""
    return {
        name: {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_the_state_dict_is_unchanged_while_hooks_stand(tmp_path: Path) -> None:
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with watched(model, tmp_path):
        model(tokens()).sum().backward()
        assert any(module._forward_hooks for module in model.modules())
        state = model.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[name], value) for name, value in before.items())
        decoder().load_state_dict(state)


def test_hooks_stand_on_sampled_steps_only(tmp_path: Path) -> None:
    model = decoder()
    before = _attributes(model)
    with attnwatch.watch(model, run=tmp_path / "run", every=3, report=False) as monitor:
        standing = []
        for _ in range(5):
            standing.append(_attributes(model) != before)
            model(tokens())
            monitor.step()
    assert standing == [True, False, False, True, False]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_after_close_the_model_holds_nothing(steps: int, tmp_path: Path) -> None:
    """Closed before, in and between sampled steps."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    before, function = _attributes(model), F.scaled_dot_product_attention
    monitor = attnwatch.watch(model, run=tmp_path / "run", every=2, report=False, optimizer=optimizer)
    for _ in range(steps):
        model(tokens()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(tokens())
    monitor.close()
    assert _attributes(model) == before
    assert not optimizer._optimizer_step_post_hooks
    assert _get_current_function_mode_stack() == []
    assert F.scaled_dot_product_attention is function


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_nothing_behind(error: type[BaseException], tmp_path: Path) -> None:
    model = decoder()
    before = _attributes(model)

    def interrupt(*_: object) -> None:
        raise error

    handle = model.blocks[1].get_submodule("attention.out").register_forward_hook(interrupt)
    with pytest.raises(error), watched(model, tmp_path):
        model(tokens())
    handle.remove()
    assert _attributes(model) == before
    assert _get_current_function_mode_stack() == []


def test_the_model_is_freed(tmp_path: Path) -> None:
    """A closed monitor does not keep it; one that was never closed closes itself with the last reference to it."""
    model = decoder()
    kept = watched(model, tmp_path)
    kept.step(loss=model(tokens()).sum())
    kept.close()
    closed = weakref.ref(model)
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters())
    attnwatch.watch(model, run=tmp_path / "dropped", report=False, optimizer=optimizer)
    model(tokens()).sum().backward()
    optimizer.step()
    dropped = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert closed() is None
    assert dropped() is None
    run = attnwatch.open_run(tmp_path / "dropped")
    assert (run.steps.tolist(), run.ended) == ([0], True)


def test_a_model_that_holds_its_monitor_is_freed(tmp_path: Path) -> None:
    """As a trainer's module does that keeps it in an attribute. Dropped in a sampled step, with all its hooks: what is
    compiled elsewhere in the process runs compiled again."""
    model = decoder()
    model.monitor = watched(model, tmp_path)  # type: ignore[assignment]
    model(tokens()).sum().backward()
    assert EagerStep.runs()
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is None
    assert not EagerStep.runs()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not Interface._installed


# --- copies -----------------------------------------------------------------------------------------------------------


def _saved(model: nn.Module, place: Path) -> nn.Module:
    torch.save(model, place / "model.pt")
    loaded: nn.Module = torch.load(place / "model.pt", weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
    "AveragedModel": lambda model, _: AveragedModel(model),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_watched_model_is_not_watched(way: str, tmp_path: Path) -> None:
    """Its hooks, copied on a sampled step, do nothing; its forward gives what the model's does."""
    model = decoder()
    with watched(model, tmp_path) as monitor:
        twin = COPIES[way](model, tmp_path)
        torch.manual_seed(2)
        made = twin(tokens())
        monitor.step()
        assert monitor.last is None
        torch.manual_seed(2)
        assert torch.equal(model(tokens()), made)
        twin(tokens())
        monitor.step()
        assert monitor.last is not None
        assert monitor.last.layers == ("blocks.0.attention", "blocks.1.attention")


def test_a_saved_model_loads_where_attnwatch_is_not_installed(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    with watched(layer, tmp_path):
        torch.save(layer, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['attnwatch'] = None\n"
        "import torch; model = torch.load('model.pt', weights_only=False)\n"
        "print(list(model(torch.ones(1, 3, 8)).shape))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.stdout == "[1, 3, 8]\n", run.stderr
