"""What hooks do in the forward of a sampled step: no wait for the device, in any family of models, and nothing left
behind from sample to sample."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from tests import zoo
from tests.devices import waits
from tests.models import Mixer, Model, parts, step, tokens
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnwatch.hooks import probe as probes
from attnwatch.hooks import statistics
from attnwatch.hooks.probe import Probe

HOOKS = probes.__file__.rpartition("/")[0]


def whose(frame: FrameType | None) -> str:
    """Where in our hooks an operation was called, "" if not there. An operation of the model that our function mode
    only hands on is the model's."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    ours = frame is not None and frame.f_code.co_filename.startswith(HOOKS)
    if frame is None or not ours or frame.f_code.co_name == "__torch_function__":
        return ""
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


class OursWaits(TorchDispatchMode):
    """Collects what of ours would wait for an accelerator; the model's own operations may."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ours = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = whose(sys._getframe(1))
        if where:
            self.ours += 1
            waiting = waits(func, args)
            if waiting:
                self.found.append(f"{waiting} in {where}")
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings(*zoo.NOISE)
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_no_family_makes_a_hook_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library builds it: fused if it offers that, else by hand. Each layer by itself, and several as one."""
    try:
        model = zoo.build(name, "sdpa")
    except zoo.NotOffered:
        model = zoo.build(name, "eager")
    probe = Probe(model.train(), rows=4, sequences=2)
    for look, block, least in ((True, 2**8, 50), (False, 2**20, 3)):
        monkeypatch.setattr(statistics, "BLOCK", block)
        probe.arm(look)
        with OursWaits() as ours:
            model(**zoo.inputs(name))
            probe._together.finish()
        assert probe.finish().problems == ()
        assert ours.ours > least
        assert ours.found == []


@pytest.mark.parametrize("read", [Tensor.item, Tensor.nonzero, lambda x: x[x > 0], bool])
def test_a_wait_of_ours_is_seen(read: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: the same code, taken for a part of the hooks."""
    monkeypatch.setattr(sys.modules[__name__], "HOOKS", __file__)
    with OursWaits() as ours:
        read(torch.ones(1))
    assert len(ours.found) == 1


class Carried(TorchFunctionMode):
    """Raises where a tensor is made on the device of what lies on the host: that copy waits for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "asarray") and str(kwargs.get("device", "cpu")) != "cpu":
            raise AssertionError(f"{name} on the device")
        if name in ("to", "copy_", "cuda") and not kwargs.get("non_blocking"):
            source, target = args[0].device, func(*args, **kwargs).device
            assert source == target, f"{name} from {source} to {target}"
        return func(*args, **kwargs)


@pytest.mark.parametrize("look", [True, False])
def test_nothing_is_carried_to_the_device_and_waited_for(look: bool) -> None:
    """A meta tensor stands for one on a device that is not the host."""
    model, x = Model(Mixer(parts())).train().to("meta"), torch.zeros(*tokens().shape, device="meta")
    probe = Probe(model, rows=4, sequences=2)
    probe.arm(look)
    with Carried():
        model(x).sum().backward()
    probe.disarm()
    assert probe._problems == []
    assert len(probe._drafts) == 1


def test_a_copy_that_is_waited_for_is_seen() -> None:
    for carry in (lambda: torch.as_tensor([1], device="meta"), lambda: torch.ones(1).to("meta")):
        with pytest.raises(AssertionError), Carried():
            carry()


def test_nothing_grows_from_sample_to_sample() -> None:
    """Tensors that live and bytes that our code holds, after 160 samples and after 320: then free lists are full."""
    model = Model(Mixer(parts(bias=True))).train()
    probe = Probe(model, rows=4)
    counted = []
    gc.collect()
    gc.freeze()  # what lives of other tests is not counted
    tracemalloc.start()
    try:
        for _ in range(2):
            for number in range(160):
                step(probe, model, tokens(), look=number % 5 == 0)
            gc.collect()
            tensors = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
            ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/attnwatch/hooks/*")])
            counted.append((tensors, sum(trace.size for trace in ours.traces)))
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    (tensors, before), (tensors_after, after) = counted
    assert tensors_after == tensors
    assert before > 0
    assert after - before < 20_000
