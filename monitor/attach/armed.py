"""The side of the process that trains: a thread that listens on a private socket and leaves the work to others.

Loads no torch: `attnwatch.arm()` may stand at the top of a script.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from attnwatch.monitor.attach import wire

LOG = logging.getLogger("attnwatch")

_HASTE = 5.0  # s that a visitor has to say what it wants
_BREATH = 0.1  # s, after what did not work


def arm() -> None:
    """Let `attnwatch attach` and `attnwatch detach` work on this process without a debugger.

    Opens a socket that only this user can reach (a file of mode 0600 in a private directory; no port of the network)
    and a thread that waits on it; takes no signal handler, loads no torch, touches no model. Idempotent. What stands
    in the way is logged, not raised.
    """
    if Listener.current is not None and Listener.current.process == os.getpid():
        Listener.current.lasting = True
        return
    try:
        Listener(wire.private_directory(), lasting=True).start()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a system without such sockets
        LOG.warning("attnwatch: not armed, so that nothing can attach: %s: %s", type(error).__name__, error)


class Listener(threading.Thread):
    """lasting: until the process ends; else until nothing is watched any more, or nobody has come before the deadline
    (time.monotonic)."""

    current: ClassVar[Listener | None] = None

    def __init__(self, directory: Path, lasting: bool, deadline: float = 0.0):
        super().__init__(name="attnwatch", daemon=True)
        self.lasting = lasting
        self.process = os.getpid()
        self._deadline = deadline
        self._path = wire.socket_path(directory, self.process)
        self._socket = wire.listen(directory)
        Listener.current = self
        atexit.register(self._leave)

    def _leave(self) -> None:
        """The file goes when the process ends by itself; a forked copy of it leaves it alone."""
        if os.getpid() == self.process:
            self._path.unlink(missing_ok=True)

    def run(self) -> None:
        try:
            while self._is_wanted():
                if wire.is_readable(self._socket, None if self.lasting else 1.0):
                    self._serve()
        finally:
            self._socket.close()
            self._leave()
            atexit.unregister(self._leave)
            Listener.current = None

    def _is_wanted(self) -> bool:
        if self.lasting or time.monotonic() < self._deadline:
            return True
        from attnwatch.monitor.attach.serving import watching

        return watching() is not None

    def _serve(self) -> None:
        try:
            with self._socket.accept()[0] as visitor:
                visitor.settimeout(_HASTE)
                if wire.credentials(visitor)[1] != os.geteuid():
                    return
                request = wire.receive(visitor)
                if request is not None:
                    self._deadline = 0.0
                    wire.send(visitor, self._answer(request, visitor))
        except Exception as error:  # it has left, or is none of ours; or this process has no file number to spare
            LOG.debug("attnwatch: a visitor of the socket: %s", error)
            time.sleep(_BREATH)

    def _answer(self, request: dict[str, Any], visitor: socket.socket) -> dict[str, Any]:
        from attnwatch.monitor.attach import serving

        def has_left() -> bool:
            try:
                return wire.is_readable(visitor, 0) and not visitor.recv(1, socket.MSG_PEEK)
            except OSError:
                return True

        return serving.answer(request, has_left)


def listen_for(directory: str, seconds: float) -> None:
    """What a debugger has this process do: listen, for the one who waits."""
    if Listener.current is None or Listener.current.process != os.getpid():
        Listener(Path(directory), lasting=False, deadline=time.monotonic() + seconds).start()
