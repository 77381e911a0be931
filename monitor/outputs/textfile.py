"""For hosts without a port: a file that node_exporter's textfile collector reads, `NAME.prom` in its directory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, get_ident

from attnwatch.monitor.outputs.exposition import Exposition
from attnwatch.monitor.sample import Metric, Update, UsageError

EVERY = 5.0
"""Seconds from one writing of the file to the next, at least."""


def replace_file(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one, never a part. Raises OSError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}~")  # matches no reader's pattern
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


class TextfileOutput:
    """Keeps the newest update in a file, written by a thread: no step waits for the disk.

    labels: put on every series, because no discovery gives it any. linger: seconds that the final state stays.
    Raises UsageError where the file cannot be written.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        path: Path,
        max_heads: int | None = None,
        labels: Mapping[str, str] | None = None,
        linger: float = 0.0,
    ) -> None:
        self.path = path
        self._exposition = Exposition(metrics, max_heads, labels)
        self._linger = linger
        self._problem: str | None = None
        self._stored = b""
        self._news, self._ended = Event(), Event()
        try:
            self._store()
        except OSError as error:
            raise UsageError(
                f"expected a file to write metrics to, found {str(path)!r} ({error.strerror or error}); "
                "pass textfile= a path in the directory that node_exporter's textfile collector reads"
            ) from None
        self._thread = Thread(target=self._keep, name="attnwatch-textfile", daemon=True)
        self._thread.start()

    def write(self, update: Update) -> str | None:
        """The file says it soon. Tells that it could not be written, which is tried again with the next update, and
        that another run writes it too."""
        self._exposition.write(update)
        self._news.set()
        problem, self._problem = self._problem, None
        return problem

    def close(self) -> None:
        """Writes the final state, leaves it for `linger` seconds, and removes the file. Safe to call twice."""
        if self._ended.is_set():
            return
        self._end()
        self._exposition.finish()
        try:
            self._store()
            time.sleep(self._linger)
        finally:
            self._remove()

    def discard(self) -> None:
        """Close at once, as if there had been no run."""
        self._end()
        self._remove()

    def _remove(self) -> None:
        if not self._is_taken():
            self.path.unlink(missing_ok=True)

    def _is_taken(self) -> bool:
        """Whether another run has written the file since this one did."""
        try:
            return self.path.read_bytes() != self._stored
        except OSError:  # it is gone, or cannot be read: writing it will say what is wrong
            return False

    def _end(self) -> None:
        self._ended.set()
        self._news.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ended.wait(EVERY):
            self._news.wait()
            self._news.clear()
            if self._ended.is_set():
                return
            if self._is_taken():
                self._problem = f"{str(self.path)!r} is written by another run too: give each a file of its own"
            try:
                self._store()
            except OSError as error:
                self._problem = f"{str(self.path)!r} could not be written ({error.strerror or error})"

    def _store(self) -> None:
        content = "".join(self._exposition.text()).encode()
        replace_file(self.path, content)
        self._stored = content
