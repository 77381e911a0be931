"""Tells an output from a thread of its own: one that is slow or hangs holds up neither training nor the others."""

from __future__ import annotations

import time
from collections import deque
from contextvars import Context, copy_context
from dataclasses import replace
from threading import Condition, Thread
from typing import TYPE_CHECKING

from attnwatch.monitor.sample import Update

if TYPE_CHECKING:
    from attnwatch.monitor.journal import Output

ROOM = 512
"""Updates that may wait for an output: some seconds of a fast training, whose threads have to take turns."""

PAUSE = 0.5
"""Seconds at most until an update without a sample or an alert is told: to wake a thread at every step costs training
a fight for the GIL."""

PATIENCE = 60.0
"""Seconds from the end of a run in which an output may take in what waits for it, and close."""


class Late(Exception):  # noqa: N818 (a state of things)
    """Raised at the end: an output did not take in everything. Its text is a problem."""


def apart(output: Output) -> Output:
    """The output, in a thread of its own unless it is `quick`."""
    return output if getattr(output, "quick", False) else Apart(output, ROOM, PATIENCE)


class Apart:
    """Stands for an output and tells it, in order, what it is told itself.

    Where `room` updates wait, a further one takes the place of the last: its alerts are kept; a sample or a step in
    between is left out, counted, and said. What the output raises is raised here by the next call, after it was closed.
    """

    def __init__(self, output: Output, room: int, patience: float) -> None:
        self.name = type(output).__name__
        self._output, self._room, self._patience = output, room, patience
        self._waiting: deque[tuple[Context, Update]] = deque()
        self._news = Condition()
        self._until: float | None = None  # by the monotonic clock; None before the end
        self._error: Exception | None = None
        self._texts: deque[str] = deque(maxlen=8)  # problems, to be told one by one
        self._left_out = 0
        self._thread = Thread(target=self._work, name=f"attnwatch-{self.name}", daemon=True)
        self._thread.start()

    def write(self, update: Update) -> str | None:
        """Never waits."""
        if self._error is not None:
            raise self._error
        with self._news:
            if len(self._waiting) >= self._room:
                update = self._instead_of(self._waiting.pop()[1], update)
            # Some libraries find their run in the context, which is the trainer's.
            self._waiting.append((copy_context(), update))
            if update.is_new or update.changed or len(self._waiting) == self._room // 2:
                self._news.notify()
        return self._texts.popleft() if self._texts else None

    def end(self) -> None:
        """Asks the output to close after what waits, and waits for nothing."""
        with self._news:
            self._until = self._until or time.monotonic() + self._patience
            self._news.notify()

    def close(self) -> None:
        """Waits until the output is closed, at most `patience` seconds from `end`. Raises what it raised, or Late."""
        self.end()
        self._thread.join(max((self._until or 0) - time.monotonic(), 0))
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            self._texts.append(f"still busy {self._patience:g} s after the end, left alone")
        if self._left_out:
            self._texts.append(f"{self._left_out} updates were left out")
        if self._texts:
            raise Late("; ".join(self._texts))

    def _instead_of(self, last: Update, update: Update) -> Update:
        if not self._left_out:
            self._texts.append(f"slower than training: {self._room} updates were waiting, further ones are left out")
        self._left_out += 1
        return replace(update, is_new=last.is_new or update.is_new, changed=last.changed + update.changed)

    def _work(self) -> None:
        error: Exception | None = None
        try:
            while (told := self._next()) is not None:
                context, update = told
                text = context.run(self._output.write, update)
                if isinstance(text, str) and text not in self._texts:
                    self._texts.append(text)
        except BaseException as raised:
            error = _plain(raised)
        try:
            self._output.close()
        except BaseException as raised:
            error = error or _plain(raised)
        self._error = error

    def _next(self) -> tuple[Context, Update] | None:
        """None at the end."""
        with self._news:
            while not self._waiting and self._until is None:
                self._news.wait(PAUSE)
            return self._waiting.popleft() if self._waiting else None


def _plain(raised: BaseException) -> Exception:
    """What ends a thread, `sys.exit` of a library say, must not end the trainer, where it is raised again."""
    return raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
