"""Carries things to where it may take long, in order, from a thread of its own: training never waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Undelivered(Exception):  # noqa: N818 (a state of things)
    """Raised by what delivers; its text is a problem that may be shown anywhere."""


class Courier(Generic[Thing]):
    """A queue and the thread that empties it, which starts with the first thing, and again with one after `close`.

    deliver: takes one thing somewhere. What it raises is a complaint, and the next thing is tried.
    room: how many things may wait; further ones are dropped, and counted in `dropped`.
    """

    def __init__(self, deliver: Callable[[Thing], None], name: str, room: int = 64) -> None:
        self._deliver, self._name, self._room = deliver, name, room
        self._queue: Queue[Thing | None] = Queue(room)
        self._thread: Thread | None = None
        self._complaints: deque[str] = deque(maxlen=8)
        self.dropped = 0

    def take(self, thing: Thing) -> None:
        """Never waits, never raises."""
        if self._thread is None:
            self._thread = Thread(target=self._work, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(thing)
        except Full:
            self.dropped += 1
            self._complain(f"more than {self._room} updates were waiting: later ones are dropped")

    def complaint(self) -> str | None:
        """What went wrong since the last time, one after the other; None for nothing."""
        return self._complaints.popleft() if self._complaints else None

    def close(self, seconds: float) -> None:
        """Wait for what is on its way, at most so long. Raises Undelivered, one line, with what was not told yet."""
        if self._thread is None:
            return
        until = time.monotonic() + seconds
        with suppress(Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(max(until - time.monotonic(), 0))
        if self._thread.is_alive():
            self._complain(f"the last updates were not delivered within {seconds:g} s")
        if self.dropped:
            self._complain(f"{self.dropped} updates were dropped")
        told = "; ".join(self._complaints)
        self._complaints.clear()
        # What is still on its way keeps its own queue: the next run may come at once.
        self._thread, self._queue, self.dropped = None, Queue(self._room), 0
        if told:
            raise Undelivered(told)

    def _work(self, queue: Queue[Thing | None]) -> None:
        while (thing := queue.get()) is not None:
            try:
                self._deliver(thing)
            except Undelivered as error:
                self._complain(str(error))
            except Exception as error:
                self._complain(f"an update could not be delivered: {type(error).__name__}")

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.append(text)
