"""A private local socket, and what goes over it: one line of JSON there, one line back.

The socket is a file of mode 0600 in a directory of mode 0700, named by the process and by the namespace of its number:
containers may share the directory, and each has a process 1. Both sides ask the kernel who the other one is.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import stat
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnwatch.monitor.sample import UsageError

LONGEST = 2**20  # bytes of a line
_LONGEST_PATH = 107  # bytes: what the kernel takes for a socket
_HIGHEST_PID = 2**22


def private_directory() -> Path:
    """The user's own directory for sockets, made if need be. Raises UsageError when it is not private."""
    path = _own_directory()
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(
            f"expected a directory of your own with mode 0700, found {path}; remove it or set XDG_RUNTIME_DIR"
        )
    return path


def _own_directory() -> Path:
    """In the runtime directory, where it is of use: shells of another user often name one that is not there."""
    name = f"attnwatch-{os.geteuid()}"
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        longest = socket_path(Path(base, name), _HIGHEST_PID)
        if os.path.isabs(base) and os.path.isdir(base) and len(os.fsencode(longest)) <= _LONGEST_PATH:
            return Path(base, name)
    return Path("/tmp", name)


def socket_path(directory: Path, pid: int) -> Path:
    return directory / f"{pid}-{_namespace()}.sock"


def _namespace() -> int:
    """That of this process's number. Raises OSError where there is no Linux."""
    return Path("/proc/self/ns/pid").stat().st_ino


def listen(directory: Path) -> socket.socket:
    """This process's socket. What processes that are gone have left in the directory is removed."""
    for old in directory.glob(f"*-{_namespace()}.sock"):
        pid = old.name.partition("-")[0]
        if pid == str(os.getpid()) or not _is_alive(pid):
            old.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = socket_path(directory, os.getpid())
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(4)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def connect(pid: int) -> socket.socket | None:
    """To the socket of that process of ours; None when it has none."""
    for path in _paths(pid):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(str(path))
        except OSError:
            peer.close()
            continue
        other, uid = credentials(peer)
        if (other, uid) == (pid, os.geteuid()):
            return peer
        peer.close()
    return None


def _paths(pid: int) -> list[Path]:
    """The kernel knows where the process has bound its socket, whatever runtime directory it was given."""
    text = os.fsdecode(Path(f"/proc/{pid}/net/unix").read_bytes())
    return [Path(path) for path in re.findall(rf" (/.*/attnwatch-{os.geteuid()}/{pid}-\d+\.sock)$", text, re.MULTILINE)]


def credentials(peer: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other side, by the kernel."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def is_readable(peer: socket.socket, seconds: float | None) -> bool:
    """Waits so long that there is something to read, the other side's end too; None: for ever."""
    poll = select.poll()  # select.select takes no file number above 1023
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def send(peer: socket.socket, data: dict[str, Any]) -> None:
    peer.sendall(json.dumps(data).encode() + b"\n")


def receive(peer: socket.socket) -> dict[str, Any] | None:
    """The other side's line; None when it closed instead. Raises ValueError for anything else, and OSError."""
    line = b""
    while not line.endswith(b"\n"):
        part = peer.recv(65536)
        if not part:
            return None
        line += part
        if len(line) > LONGEST:
            raise ValueError("too long")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found
