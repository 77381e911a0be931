"""Between two optimizer steps: the one place where a thread may have something done to a model that trains.

Work runs in the thread that trains, in a hook after its optimizer's step: no forward, backward or step is under way.
torch iterates over its dictionary of such hooks while it calls them, and Python allows no change of a dictionary
meanwhile: the hook is put on and taken off while no thread is at the end of an optimizer step, where they are called.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

AfterStep = Callable[[Optimizer], None]
T = TypeVar("T")

_PATIENCE = 30.0  # s; hooks are short
_UNDISTURBED = 0.1  # s that a thread keeps the interpreter's lock, where others ask for it
_STEP = Optimizer.profile_hook_step(lambda: None).__code__


class Crossing:
    """Calls `after` behind every optimizer step of this process, from `open` to `close`; not in forked copies of it."""

    def __init__(self) -> None:
        self.after: AfterStep | None = None
        self._asked: _Asked | None = None
        self._handle: RemovableHandle | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()

    def open(self) -> None:
        """Idempotent. Raises TimeoutError when optimizer steps leave no gap."""
        if self._handle is not None:
            return

        def hook(optimizer: Optimizer, arguments: Any, named: Any) -> None:
            self._crossed(optimizer)

        # By its name in sys.modules: torch.optim has another thing called optimizer. `_disable_dynamo` is torch's own
        # way to keep a compiled step from tracing a hook, without loading the compiler before the hook is called.
        register = import_module("torch.optim.optimizer").register_optimizer_step_post_hook
        quiet = import_module("torch._compile")._disable_dynamo(hook)
        self._handle = _between_hooks(lambda: register(quiet))

    def close(self) -> None:
        """Idempotent. Raises TimeoutError when optimizer steps leave no gap; the hook then stays and does nothing."""
        self.after = self._asked = None
        if self._handle is not None:
            _between_hooks(self._handle.remove)
            self._handle = None

    def ask(self, work: Callable[[Optimizer], T | None], given_up: Callable[[], bool]) -> T:
        """From another thread: what `work` gives behind an optimizer's step, the first that is not None.

        Raises what it raises, and TimeoutError when it was given up before.
        """
        asked = self._asked = _Asked(work, given_up)
        while not asked.done.wait(0.02) and not given_up():
            pass
        with self._lock:  # not while it is at work
            self._asked = None
        if asked.error is not None:
            raise asked.error
        if asked.answer is None:
            raise TimeoutError("no optimizer step")
        answer: T = asked.answer
        return answer

    def _crossed(self, optimizer: Optimizer) -> None:
        if os.getpid() != self._process or _is_inner(optimizer):
            return
        with self._lock:
            if self.after is not None:
                self.after(optimizer)
            if self._asked is not None and self._asked.carry_out(optimizer):
                self._asked = None


class _Asked:
    def __init__(self, work: Callable[[Optimizer], Any], given_up: Callable[[], bool]):
        self._work, self._given_up = work, given_up
        self.done = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def carry_out(self, optimizer: Optimizer) -> bool:
        """Whether it is done; what it raises is for the one who asked. Not for one who has left meanwhile."""
        if self._given_up():
            return False
        try:
            self.answer = self._work(optimizer)
        except Exception as error:
            self.error = error
        if self.answer is None and self.error is None:
            return False
        self.done.set()
        return True


_turn = threading.RLock()
if sys.platform != "win32":  # a copy made meanwhile would be left with what is set for a moment
    os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release)


def _between_hooks(change: Callable[[], T]) -> T:
    """`change`, done while no thread can be at the hooks: nothing else runs between the look and the change."""

    def look_and_change() -> tuple[T] | None:
        return None if any(map(_calls_hooks, _steps_under_way())) else (change(),)

    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with _turn:
            changed = _alone(look_and_change)
        if changed is not None:
            return changed[0]
        time.sleep(0.001)
    raise TimeoutError(f"optimizer steps left no gap in {_PATIENCE:g} s")


def _alone(work: Callable[[], T]) -> T:
    """`work`, while no other thread is given the interpreter's lock, unless by what calls for it there.

    Who asks for the lock waits for the switch interval, counted anew when another one has had it: it is set before the
    pause, in which the lock changes hands, since a shorter one may run already. A collection might run finalizers,
    which may hand the lock over.
    """
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(_UNDISTURBED)
        time.sleep(0.001)
        collects = gc.isenabled()
        try:
            gc.disable()
            return work()
        finally:
            if collects:
                gc.enable()
    finally:
        if abs(sys.getswitchinterval() - _UNDISTURBED) < 5e-7:  # else another thread has set one in the pause
            sys.setswitchinterval(interval + 5e-7)  # Python rounds down to whole microseconds


def _steps_under_way() -> Iterator[FrameType]:
    """Of all threads: the function that torch puts around every optimizer's step, which calls the hooks."""
    for frame in sys._current_frames().values():
        yield from (at for at in callers(frame) if at.f_code is _STEP)


def _calls_hooks(step: FrameType) -> bool:
    """Whether the step proper is done. It may take as long as training: some trainers do it all in its closure."""
    return "out" not in _STEP.co_varnames or "out" in step.f_locals


def _is_inner(optimizer: Optimizer) -> bool:
    """Whether this is the step of a base class within the optimizer's own, which comes to its hooks too."""
    own = (at for at in callers(sys._getframe()) if at.f_code is _STEP and at.f_locals.get("self") is optimizer)
    return sum(1 for _ in own) > 1


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
