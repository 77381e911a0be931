"""The side of the one who attaches: a request over the socket, and the reply."""

from __future__ import annotations

import socket
from typing import Any

import attnwatch
from attnwatch.monitor.attach import wire
from attnwatch.monitor.sample import UsageError

_GRACE = 60.0  # s that a busy process may take beyond what it was given: loading libraries, writing a report


def ask(peer: socket.socket, what: str, patience: float, **more: Any) -> dict[str, Any]:
    """The reply. patience: seconds that the process may wait for its next step. Raises UsageError."""
    try:
        peer.settimeout(patience + _GRACE)
        wire.send(peer, {"do": what, "version": attnwatch.__version__, "patience": patience, **more})
        reply = wire.receive(peer)
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a reply of the process, found {type(error).__name__}: {error}") from None
    if reply is None:
        raise UsageError("expected a reply of the process, found that it has ended meanwhile")
    if "error" in reply:
        raise UsageError(reply["error"])
    return reply
