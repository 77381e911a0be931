"""A real pseudo-terminal with a process in it, and an emulator that shows what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pyte


class Window:
    """A terminal window. The process in it has it as its controlling terminal, as under a shell."""

    def __init__(self, command: Sequence[str | Path], columns: int = 100, lines: int = 40, **environment: str) -> None:
        self._leader, self._follower = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._set_size(columns, lines)
        self.modes = self._modes_now()
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=self._follower, stdout=self._follower, stderr=self._follower, start_new_session=True,
            env={**kept, "TERM": "xterm-256color", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # type: ignore[arg-type, return-value]
        )  # fmt: skip

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._follower)
        os.close(self._leader)

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)  # the kernel sends SIGWINCH

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def sees(self, *texts: str, not_: str | None = None, seconds: float = 120) -> str:
        """Waits until all the texts are on a whole page of ours, and the other is not; returns the screen."""

        def is_there() -> bool:
            is_whole = self.raw.endswith(b"\x1b[J")  # what is below is erased at last; a page may come in parts
            return is_whole and all(text in self.text for text in texts) and (not_ is None or not_ not in self.text)

        self.until(is_there, seconds)
        return self.text

    def until(self, is_so: Callable[[], bool], seconds: float = 120) -> None:
        """Waits until something holds; fails with the screen when the process ends before."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"waited too long:\n{self.text}"
            assert self._take(0.1) or self.process.poll() is None, f"has ended:\n{self.text}"

    def ends(self, seconds: float = 120) -> int:
        """Waits for the process; returns its exit status, with all it wrote on the screen."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still runs:\n{self.text}"
            self._take(0.1)
        while self._take(0):
            pass
        return self.process.wait()

    def is_given_back(self) -> bool:
        """Whether the shell finds its terminal as it was: own page, cursor shown, lines and echo."""
        page = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")  # pyte knows no other page
        return page and not self.screen.cursor.hidden and self._modes_now() == self.modes

    def _take(self, seconds: float) -> bool:
        if not select.select([self._leader], [], [], seconds)[0]:
            return False
        data = os.read(self._leader, 65536)
        self.raw += data
        self._stream.feed(data)
        return True

    def _modes_now(self) -> list[object]:
        return list(termios.tcgetattr(self._follower))

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def stopped(command: str, shown: str) -> Iterator[Window]:
    """A shell in which a command was stopped by Ctrl-Z, once it had shown something."""
    with Window(["bash", "--norc", "--noprofile", "-i"], PS1="$ ") as window:
        window.until(lambda: "$" in window.text)
        window.type(f"{command}\n")
        window.sees(shown)
        window.type("\x1a")
        window.until(lambda: "Stopped" in window.text)
        yield window
