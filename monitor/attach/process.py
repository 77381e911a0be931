"""What can be known of another process before anything is done to it (Linux: /proc)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from attnwatch.monitor.sample import UsageError

OLDEST = (3, 11)
"""The Python that attnwatch needs."""


class Target(NamedTuple):
    """A running Python process of this user. python: (3, minor), None where its files do not tell."""

    pid: int
    python: tuple[int, int] | None


def target(pid: int) -> Target:
    """Raises UsageError, one line, for a process that nothing can be attached to."""
    proc = Path("/proc") / str(pid)
    if not Path("/proc/self").exists():
        raise UsageError("expected Linux, whose /proc tells of processes, found none; watch from the trainer itself")
    try:
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        state, tracer, whole = status["State"].strip(), int(status["TracerPid"]), int(status["Tgid"])
        uid = int(status["Uid"].split()[1])  # the effective one
        numbers = status.get("NSpid", str(pid)).split()  # in this namespace, and in those below it
        if state.startswith("Z"):
            raise UsageError(
                f"expected a running process, found {pid} ended (a zombie: its parent has not waited for it)"
            )
        if uid != os.geteuid():
            raise UsageError(f"expected a process of your own, found {pid} of user {uid}; run this as that user")
        if len(numbers) > 1:
            raise UsageError(
                f"expected a process of this container, found {pid} in one of its own, as process {numbers[-1]}; "
                "run this inside that one"
            )
        python = _python(proc)
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(
            f"expected a running process, found no process {pid}; it has ended, or lives in another container"
        ) from None
    if whole != pid:
        raise UsageError(f"expected a process, found {pid} to be a thread of process {whole}")
    if tracer:
        raise UsageError(TRACED.format(pid=pid, tracer=tracer))
    if state[:1] in "Tt":
        raise UsageError(f"expected a process that runs, found {pid} stopped; let it go on: kill -CONT {pid}")
    if python is not None and python < OLDEST:
        ours, theirs = (".".join(map(str, version)) for version in (OLDEST, python))
        raise UsageError(
            f"expected Python {ours} or later, found {pid} running {theirs}, which attnwatch does not know"
        )
    return Target(pid, python)


TRACED = "expected a process that nobody debugs, found {pid} traced by process {tracer}; end that first"


def is_alive(pid: int) -> bool:
    try:
        return not re.search(r"^State:\s*[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False


def _python(proc: Path) -> tuple[int, int] | None:
    """By the name of its program, or of the library it has loaded; None where we may not look."""
    try:
        program, maps = os.readlink(proc / "exe"), (proc / "maps").read_text(errors="replace")
    except PermissionError:  # as in a container without ptrace
        return None
    names = [Path(program).name, *re.findall(r"/(libpython[^/\s]*)", maps)]
    versions = [re.search(r"^(?:lib)?python(\d)\.(\d+)", name) for name in names]
    for version in versions:
        if version is not None:
            return int(version[1]), int(version[2])
    if not any(re.match(r"^(?:lib)?python", name) for name in names):
        raise UsageError(f"expected a Python process, found {program}; name the process that trains, not its launcher")
    return None
