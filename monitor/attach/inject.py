"""Having a process that was not armed listen: by Python 3.14's own way, or by a debugger.

The debugger stops the process, maps one page, writes a line of Python into it and has the interpreter note a pending
call. The interpreter carries it out in its main thread at the next point where it would handle a signal. Nothing is
allocated in the process and no lock is waited for, so that it may be stopped anywhere; calling into the interpreter at
once, as injectors commonly do, hangs a process that was stopped inside malloc or beside the interpreter's lock.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

import attnwatch
from attnwatch.monitor.attach import wire
from attnwatch.monitor.attach.process import TRACED, Target, is_alive
from attnwatch.monitor.sample import UsageError

UNSAFE = (
    "stops process {pid} for about a second and has a debugger write into it; if you accept that, add --unsafe "
    "(without it: attnwatch.arm() in the trainer, or Python 3.14)"
)

_GDB = 120.0  # s that gdb may take, on a busy machine
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_CODE = """\
def begin():
    import json, sys, threading, time

    def listen():
        try:
            if time.time() < {until!r}:
                from attnwatch.monitor.attach.armed import listen_for

                listen_for({directory!r}, {seconds!r})
        except BaseException as error:
            missing = isinstance(error, ImportError) and (error.name or "").split(".")[0] == "attnwatch"
            failed = {{"missing": missing, "python": sys.executable, "error": f"{{type(error).__name__}}: {{error}}"}}
            with open({failure!r}, "x") as file:
                json.dump(failed, file)

    threading.Thread(target=listen, daemon=True).start()


__import__("_thread").start_new_thread(begin, ())
"""
"""Begins a thread and nothing else: the main thread may stand anywhere, with locks held that Python code takes."""

_THREAD = """\
import contextlib, pathlib
with contextlib.suppress(FileNotFoundError):
    exec(pathlib.Path({path!r}).read_text(), {{}})
"""
"""When the file is gone, because nobody waits any more, it does nothing."""

_LINE = """\
try:
    __import__("_thread").start_new_thread(exec, ({thread!r}, {{}}))
except BaseException:
    pass
\0"""
"""What the interpreter is given for its main thread. It must not fail: that would raise a SystemError there."""


def inject(target: Target, patience: float, unsafe: bool) -> socket.socket:
    """Have the process listen, and connect to it. patience: seconds. Raises UsageError."""
    check_way(target, unsafe)
    directory = wire.private_directory()
    with _staged(target, directory, patience) as (code, failure):
        if _knows_remote_exec(target):
            _remote_exec(target, code)
        else:
            _pending_call(target, code)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            peer = wire.connect(target.pid) if is_alive(target.pid) else None
            if peer is not None:
                return peer
            if failure.exists() and (text := failure.read_text()).endswith("}"):
                raise UsageError(_failed(json.loads(text)))
            if not is_alive(target.pid):
                raise UsageError(_ENDED.format(pid=target.pid))
            time.sleep(0.02)
    raise UsageError(
        f"expected process {target.pid} to run Python code, found none in {patience:g} s: its main thread is in C "
        "code; nothing will happen when it comes back; try again, or give --timeout"
    )


def check_way(target: Target, unsafe: bool) -> None:
    """Raises UsageError when there is no way, or none that was allowed."""
    if target.python is not None and target.python >= (3, 14):
        if not _knows_remote_exec(target):
            ours, theirs = (".".join(map(str, version)) for version in (sys.version_info[:2], target.python))
            raise UsageError(
                f"expected the Python of process {target.pid} ({theirs}), found {ours}; "
                "run attnwatch with the process's own"
            )
        return
    if not unsafe:
        raise UsageError(f"expected an armed process; attaching to one that is not {UNSAFE.format(pid=target.pid)}")
    if shutil.which("gdb") is None:
        raise UsageError("expected gdb, found none; install it, or call attnwatch.arm() in the trainer")


def _knows_remote_exec(target: Target) -> bool:
    return hasattr(sys, "remote_exec") and target.python == sys.version_info[:2]


@contextmanager
def _staged(target: Target, directory: Path, patience: float) -> Iterator[tuple[Path, Path]]:
    """The code in a private file, for as long as somebody waits; and where it says that it failed."""
    name = f"{target.pid}-{secrets.token_hex(8)}"
    code, failure = directory / f"{name}.py", directory / f"{name}.json"
    filled = _CODE.format(
        until=time.time() + _GDB + patience, directory=str(directory), seconds=patience, failure=str(failure)
    )
    code.write_text(filled)
    code.chmod(0o600)
    try:
        yield code, failure
    finally:
        code.unlink(missing_ok=True)
        failure.unlink(missing_ok=True)


def _remote_exec(target: Target, code: Path) -> None:
    try:
        sys.remote_exec(target.pid, str(code))  # type: ignore[attr-defined,unused-ignore]
    except PermissionError as error:
        raise UsageError(_NOT_ALLOWED.format(pid=target.pid, found=error.strerror or error)) from None
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"expected process {target.pid} to take remote code, found {error}; was it started with "
            "PYTHON_DISABLE_REMOTE_DEBUG, or by another build of Python?"
        ) from None


_ENDED = "expected a running process, found that {pid} has ended meanwhile"

_NOT_ALLOWED = (
    "expected to be allowed to debug process {pid}, found {found}; in a container add the capability SYS_PTRACE, on a "
    "host see /proc/sys/kernel/yama/ptrace_scope"
)


def _pending_call(target: Target, code: Path) -> None:
    line = code.with_suffix(".line")
    line.write_text(_LINE.format(thread=_THREAD.format(path=str(code))))
    steps = [
        "sharedlibrary libpython",
        "sharedlibrary libc.so",
        # PROT_READ | PROT_WRITE = 3, MAP_PRIVATE | MAP_ANONYMOUS = 34
        "set $page = ((void *(*)(void *, unsigned long, int, int, int, long)) mmap)(0, 4096, 3, 34, -1, 0)",
        f"restore {line} binary $page",
        "print ((int (*)(void *, void *)) Py_AddPendingCall)((void *) PyRun_SimpleString, $page)",
    ]
    quiet = ["set auto-solib-add off", "set auto-load no", "set debuginfod enabled off", "set confirm off"]
    # A signal that comes meanwhile is for the process: gdb would stop for it, and leave in the middle of a call.
    quiet += ["handle all nostop noprint pass", "handle SIGINT nostop noprint pass", "set unwindonsignal on"]
    command = ["gdb", "-nx", "-batch", *(part for text in quiet for part in ("-iex", text)), "-p", str(target.pid)]
    try:
        with _undisturbed():
            done = subprocess.run(
                [*command, *(part for text in steps for part in ("-ex", text))],
                capture_output=True, text=True, timeout=_GDB, stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"expected gdb to be done in {_GDB:g} s, found it still at work; look at the process"
        ) from None
    finally:
        line.unlink(missing_ok=True)
    said = done.stdout + done.stderr
    if "$1 = 0" in said:
        return
    if not is_alive(target.pid):
        raise UsageError(_ENDED.format(pid=target.pid))
    other = re.search(r"already traced by process (\d+)", said)
    if other is not None:
        raise UsageError(TRACED.format(pid=target.pid, tracer=other[1]))
    if "Operation not permitted" in said:
        raise UsageError(_NOT_ALLOWED.format(pid=target.pid, found="Operation not permitted"))
    last = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
    raise UsageError(f"expected gdb to reach the interpreter of process {target.pid}, found: {last[:200]}")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and the like come when gdb is done, also to gdb: cut off in the middle of a call it would leave the
    process there, and end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _failed(found: dict[str, object]) -> str:
    if not found["missing"]:
        return f"expected the process to load attnwatch, found {found['error']}"
    return (
        f"expected attnwatch in the Python of the process, found none; install it: "
        f"{shlex.join([str(found['python']), '-m', 'pip', 'install', _source()])}"
    )


def _source() -> str:
    """What pip was given when this attnwatch was installed: a folder, or the name."""
    kept = importlib.metadata.distribution("attnwatch").read_text("direct_url.json")
    url = urlparse(json.loads(kept)["url"]) if kept else None
    return unquote(url.path) if url is not None and url.scheme == "file" else f"attnwatch=={attnwatch.__version__}"
