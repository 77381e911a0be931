"""Between two optimizer steps: the one place where a thread may have something done to a model that trains.

Work runs in the thread that trains, in a hook after its optimizer's step: no forward, backward or step is under way.
torch iterates over its dictionary of such hooks while it calls them, and Python allows no change of a dictionary
meanwhile: the hook is put on and taken off while no thread is inside an optimizer step.
"""

from __future__ import annotations

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

_PATIENCE = 30.0  # s; steps are short, or the time between them is


class Crossing:
    """Calls `after` behind every optimizer step of the process, from `open` to `close`."""

    def __init__(self) -> None:
        self.after: AfterStep | None = None
        self._asked: _Asked | None = None
        self._handle: RemovableHandle | None = None
        self._lock = threading.RLock()

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
        self._handle = _outside_of_steps(lambda: register(quiet))

    def close(self) -> None:
        """Idempotent. Raises TimeoutError when optimizer steps leave no gap; the hook then stays and does nothing."""
        self.after = self._asked = None
        if self._handle is not None:
            _outside_of_steps(self._handle.remove)
            self._handle = None

    def ask(self, work: Callable[[Optimizer], T | None], given_up: Callable[[], bool]) -> T:
        """From another thread: what `work` gives behind an optimizer's step, the first that is not None.

        Raises what it raises, and TimeoutError when it was given up before.
        """
        asked = self._asked = _Asked(work)
        while not asked.done.wait(0.02):
            if given_up():
                with self._lock:  # not while it is at work
                    self._asked = None
                break
        if asked.error is not None:
            raise asked.error
        if asked.answer is None:
            raise TimeoutError("no optimizer step")
        answer: T = asked.answer
        return answer

    def _crossed(self, optimizer: Optimizer) -> None:
        with self._lock:
            if self._asked is not None:
                if self._asked.carry_out(optimizer):
                    self._asked = None
            elif self.after is not None:
                self.after(optimizer)


class _Asked:
    def __init__(self, work: Callable[[Optimizer], Any]):
        self._work = work
        self.done = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def carry_out(self, optimizer: Optimizer) -> bool:
        """Whether it is done; what it raises is for the one who asked."""
        try:
            self.answer = self._work(optimizer)
        except Exception as error:
            self.error = error
        if self.answer is None and self.error is None:
            return False
        self.done.set()
        return True


def _outside_of_steps(change: Callable[[], T]) -> T:
    """A thread that has just begun to run goes on for milliseconds: nothing begins between look and change."""
    end = time.monotonic() + _PATIENCE
    while _stepping():
        if time.monotonic() > end:
            raise TimeoutError(f"optimizer steps left no gap in {_PATIENCE:g} s")
        time.sleep(0.001)
    return change()


def _stepping() -> bool:
    """Whether some thread is inside the function that torch puts around every optimizer's step."""
    code = Optimizer.profile_hook_step(lambda: None).__code__
    return any(at.f_code is code for frame in sys._current_frames().values() for at in callers(frame))


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
