"""The terminal of the live screen: its own page, single keys, and everything as it was at the end, however that comes.

Needs termios (Linux, macOS, WSL); nothing else of attnwatch does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from attnwatch.reports.keys import decode

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other page, no cursor, clear
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
_DEADLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class _Killed(BaseException):
    """A signal that ends the process asked for it; BaseException, so that nothing on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        self.number = number


class Terminal:
    """The screen and the keyboard while they are ours. Made by `terminal()`."""

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        self._keyboard, self._screen = keyboard.fileno(), screen
        self._console = Console(file=screen, force_terminal=True, highlight=False, soft_wrap=True)
        self._before = termios.tcgetattr(self._keyboard)
        self._unfinished = b""
        self._stop_asked = False
        self._wake, self._woken = os.pipe()  # a signal writes into it, so that `keys` wakes up
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        try:
            columns, lines = os.get_terminal_size(self._screen.fileno())
        except OSError:
            columns = lines = 0
        return columns or 80, lines or 24  # a pty that nobody gave a size says 0

    @property
    def ascii_only(self) -> bool:
        return self._console.options.ascii_only

    def draw(self, lines: Iterable[Text]) -> None:
        """Over what was there, line by line: nothing is cleared first, so nothing flickers."""
        with self._console.capture() as capture:
            for line in lines:
                self._console.print(line, end="\n", markup=False)
        page = capture.get().rstrip("\n").replace("\n", "\r\n\x1b[K")  # erased before it is written
        self._write(f"\x1b[H\x1b[K{page}\x1b[0m\x1b[J")

    def keys(self, seconds: float) -> list[str] | None:
        """The keys of the next `seconds`, as soon as there are some; [] after them or when the window has changed.

        None when the keyboard is gone.
        """
        ready, _, _ = select.select([self._keyboard, self._wake], [], [], max(seconds, 0.0))
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._stop_asked:
            self._stop()
        if self._keyboard not in ready:
            return []
        data = os.read(self._keyboard, 4096)
        if not data:
            return None
        found, self._unfinished = decode(self._unfinished + data)
        return found

    def enter(self) -> None:
        tty.setcbreak(self._keyboard, termios.TCSANOW)
        modes = termios.tcgetattr(self._keyboard)
        modes[0] &= ~termios.IXON  # Ctrl-S would hold the screen, and a signal could not end who waits to write on it
        termios.tcsetattr(self._keyboard, termios.TCSANOW, modes)
        self._write(_ENTER)

    def leave(self) -> None:
        if self._is_another_s():
            return
        with contextlib.suppress(OSError, termios.error):  # the terminal itself may be gone
            self._write(_LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._before)

    def _is_another_s(self) -> bool:
        """Whether the shell has the terminal: it was given back by Ctrl-Z, and whoever touches it now is stopped."""
        with contextlib.suppress(OSError):  # no terminal of ours to share with a shell
            return os.tcgetpgrp(self._keyboard) not in (os.getpgrp(), 0)  # 0: a group of another container
        return False

    def close(self) -> None:
        os.close(self._wake)
        os.close(self._woken)

    def ask_stop(self, *_: object) -> None:
        """Ctrl-Z: what it does waits for `keys`, where nothing is half drawn."""
        self._stop_asked = True

    @property
    def wakeup(self) -> int:
        return self._woken

    def _stop(self) -> None:
        """Gives the terminal back, stops as any program does, and goes on where `fg` continues it."""
        self._stop_asked = False
        self.leave()
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self._before = termios.tcgetattr(self._keyboard)
        self.enter()

    def _write(self, text: str) -> None:
        self._screen.write(text)
        self._screen.flush()


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """Takes the terminal of stdin and stdout; gives it back as it was, also after an error, Ctrl-C, SIGTERM and SIGHUP.

    The last two then end the process as they would have: who sent them sees that they did. Of several the first counts.
    """
    ours = Terminal(sys.stdin, sys.stdout)
    handlers: dict[int, Any] = dict.fromkeys(_DEADLY, _die)
    handlers |= {signal.SIGTSTP: ours.ask_stop, signal.SIGWINCH: lambda *_: None}
    before = {number: signal.getsignal(number) for number in handlers}
    wakeup = signal.set_wakeup_fd(ours.wakeup, warn_on_full_buffer=False)
    killed = 0
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        ours.enter()
        yield ours
    except _Killed as end:
        killed = end.number
    finally:
        ours.leave()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
    if killed:
        signal.signal(killed, signal.SIG_DFL)
        signal.raise_signal(killed)


def _die(number: int, _: FrameType | None) -> None:
    for deadly in _DEADLY:
        # Once is enough: nothing may interrupt the giving back. Of SIG_IGN Python complains if one has come already.
        signal.signal(deadly, lambda *_: None)
    raise KeyboardInterrupt if number == signal.SIGINT else _Killed(number)
