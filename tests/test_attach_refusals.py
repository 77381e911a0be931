"""Processes that nothing can be attached to: one line that says what was found and what to do, and exit code 2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.attaching import COMMAND, SCRIPT, Shell

import attnwatch
from attnwatch.monitor.attach.wire import socket_path

READY = "print('ready', flush=True)"
ARMED = "from attnwatch.monitor.attach.armed import arm; arm()"
FOREVER = "import time\nwhile True: time.sleep(0.01)"


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("r"))


@contextmanager
def script(shell: Shell, *lines: str, before: tuple[str, ...] = (), **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said that it is ready."""
    process = shell.start(*before, "-c", "\n".join((*lines[:-1], READY, lines[-1])), **more)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_that_has_ended(shell: Shell) -> None:
    process = shell.start("-c", "")
    process.communicate()
    assert f"found no process {process.pid}; it has ended" in shell.refuses("attach", process.pid)


def test_a_zombie(shell: Shell, wait_for: Callable[..., Any]) -> None:
    process = shell.start("-c", "")
    wait_for(lambda: "State:\tZ" in Path(f"/proc/{process.pid}/status").read_text(), "its end")
    assert f"found {process.pid} ended (a zombie" in shell.refuses("attach", process.pid)
    process.communicate()


def test_what_is_no_python(shell: Shell) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert "expected a Python process, found" in shell.refuses("attach", process.pid)
        process.kill()


def test_a_python_before_ours(shell: Shell, tmp_path: Path) -> None:
    """A program of that name, which the line is about."""
    old = tmp_path / "python3.10"
    shutil.copy("/bin/sleep", old)
    with subprocess.Popen([old, "600"]) as process:
        assert f"expected Python 3.11 or later, found {process.pid} running 3.10" in shell.refuses(
            "attach", process.pid, "--unsafe"
        )
        process.kill()


def test_a_thread_is_no_process(shell: Shell) -> None:
    waits = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    with script(shell, waits, FOREVER) as process:
        threads = {int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()}
        (thread,) = threads - {process.pid}
        line = shell.refuses("attach", thread, "--unsafe")
    assert f"found {thread} to be a thread of process {process.pid}" in line


def test_the_process_of_another_user(shell: Shell) -> None:
    """As root or not: somebody else's."""
    if os.geteuid():
        pid: int = 1
        assert "run this as" in shell.refuses("attach", pid)
        return
    with subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "600"]) as process:
        deadline = time.monotonic() + 30
        while "Uid:\t65534" not in Path(f"/proc/{process.pid}/status").read_text():
            assert time.monotonic() < deadline
        assert f"found {process.pid} of user 65534; run this as that user" in shell.refuses("attach", process.pid)
        process.kill()


def test_a_process_in_a_container_below(shell: Shell, tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """Its number is another one in there, and with it the name of its socket."""
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs the permission to make a namespace of processes")
    there = tmp_path / "there"
    code = f"{ARMED}; import pathlib; pathlib.Path({str(there)!r}).touch(); input()"
    with subprocess.Popen([*apart, sys.executable, "-c", code], stdin=subprocess.PIPE, env=shell.environment) as around:
        wait_for(there.exists, "it to be armed")
        (pid,) = Path(f"/proc/{around.pid}/task/{around.pid}/children").read_text().split()
        for command in (["attach", pid, "--unsafe"], ["detach", pid]):
            assert f"found {pid} in one of its own, as process 1" in shell.refuses(*command)
        around.communicate(b"\n")


def test_a_process_that_stands_still(shell: Shell, wait_for: Callable[..., Any]) -> None:
    with script(shell, FOREVER) as process:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: "State:\tT" in Path(f"/proc/{process.pid}/status").read_text(), "it to stop")
        assert f"let it go on: kill -CONT {process.pid}" in shell.refuses("attach", process.pid)


def test_gdb_is_asked_for_only_where_it_is_accepted_and_found(shell: Shell, tmp_path: Path) -> None:
    with script(shell, FOREVER) as process:
        line = shell.refuses("attach", process.pid)
        assert "stops process" in line
        assert "add --unsafe" in line
        without = {**shell.environment, "PATH": str(tmp_path)}
        assert "expected gdb, found none" in shell.refuses("attach", process.pid, "--unsafe", env=without)


def test_a_container_that_allows_no_debugging(program: Callable[[str], str], shell: Shell) -> None:
    """As root without the capability; the process has it."""
    program("gdb")
    if os.geteuid():
        pytest.skip("needs root, to give a capability away")
    with script(shell, FOREVER) as process:
        command = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", sys.executable, "-m", "attnwatch"]
        done = subprocess.run(
            [*command, "attach", str(process.pid), "--unsafe"], capture_output=True, text=True, env=shell.environment
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert "found Operation not permitted; in a container add the capability SYS_PTRACE" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_process_that_is_debugged(program: Callable[[str], str], shell: Shell, wait_for: Callable[..., Any]) -> None:
    with script(shell, FOREVER) as process:
        gdb = subprocess.Popen(
            [program("gdb"), "-nx", "-q", "-p", str(process.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda: f"TracerPid:\t{gdb.pid}" in Path(f"/proc/{process.pid}/status").read_text(), "gdb")
        assert f"traced by process {gdb.pid}" in shell.refuses("attach", process.pid, "--unsafe")
        gdb.communicate(b"detach\nquit\n")


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.1, 0.15])
def test_who_attaches_may_change_their_mind_while_the_debugger_is_at_work(
    moment: float, program: Callable[[str], str], shell: Shell, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of a terminal, gdb too: it must not leave the process in the middle of a call.

    The process keeps others from importing anything: who attaches waits until the Ctrl-C, on a slow machine too."""
    program("gdb")
    until = f"while not os.path.exists({str(tmp_path / 'stop')!r}): time.sleep(0.01)"
    with script(shell, "import _imp, os, time; _imp.acquire_lock()", f"{until}\nprint('done')") as process:
        status = Path(f"/proc/{process.pid}/status")
        attach = [COMMAND, "attach", str(process.pid), "--unsafe", "--timeout", "120", "--run", str(tmp_path / "run")]
        attaching = subprocess.Popen(
            attach, env=shell.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        deadline = time.monotonic() + 30  # for who is too slow to see gdb: then it has done its work
        while "TracerPid:\t0" in status.read_text() and time.monotonic() < deadline:
            assert attaching.poll() is None
        time.sleep(moment)  # of gdb's work, which takes about 0.2 s
        os.killpg(attaching.pid, signal.SIGINT)
        _, said = attaching.communicate(timeout=120)
        assert attaching.returncode == 130, said
        assert "TracerPid:\t0" in status.read_text()
        (tmp_path / "stop").touch()
        assert process.communicate(timeout=240)[0] == "done\n"
        assert process.returncode == 0


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT", "SIGSTOP"])
def test_a_signal_to_the_process_while_the_debugger_is_at_work(
    name: str, program: Callable[[str], str], shell: Shell, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """As schedulers send them before they end a job. The process handles it, and goes on."""
    program("gdb")
    until = f"while not os.path.exists({str(tmp_path / 'stop')!r}): time.sleep(0.01)"
    handles = "[signal.signal(s, lambda *_: print('handled', flush=True)) for s in (signal.SIGUSR1, signal.SIGINT)]"
    with script(shell, f"import os, signal, time; {handles}", f"{until}\nprint('done')") as process:
        status = Path(f"/proc/{process.pid}/status")
        attaching = subprocess.Popen(
            [COMMAND, "attach", str(process.pid), "--unsafe"], env=shell.environment, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while "TracerPid:\t0" in status.read_text():  # gdb is there for about 0.2 s
            assert time.monotonic() < deadline
        process.send_signal(signal.Signals[name])
        wait_for(lambda: "TracerPid:\t0" in status.read_text(), "gdb to be done")
        process.send_signal(signal.SIGCONT)
        assert "found none loaded in it; wait until it trains" in attaching.communicate(timeout=120)[1]
        (tmp_path / "stop").touch()
        assert process.communicate(timeout=240)[0] == ("" if name == "SIGSTOP" else "handled\n") + "done\n"
        assert process.returncode == 0


def test_a_python_that_lacks_attnwatch_is_told_how_to_install_it(program: Callable[[str], str], shell: Shell) -> None:
    program("gdb")
    with script(shell, FOREVER, before=("-S",)) as process:
        line = shell.refuses("attach", process.pid, "--unsafe")
    assert f"expected attnwatch in the Python of the process, found none; install it: {sys.executable} -m pip" in line


def test_a_process_in_c_code_is_given_up_and_never_begins_later(program: Callable[[str], str], shell: Shell) -> None:
    """It holds the interpreter's lock in C until it is told to come back; then nothing listens in it."""
    program("gdb")
    hold = "libc = ctypes.PyDLL(None); libc.getchar()"
    after = "import threading; time.sleep(0.5); print(threading.active_count(), flush=True)"
    lines = ("import ctypes, time", f"{hold}; {after}")
    with script(shell, *lines, stdin=subprocess.PIPE) as process:
        line = shell.refuses("attach", process.pid, "--unsafe", "--timeout", 1)
        assert "expected process" in line
        assert "its main thread is in C code; nothing will happen when it comes back" in line
        said, _ = process.communicate("x\n", timeout=240)
    assert said == "1\n"
    assert list(Path(shell.environment["XDG_RUNTIME_DIR"], f"attnwatch-{os.geteuid()}").iterdir()) == []


def test_a_process_that_does_not_train(shell: Shell, tmp_path: Path) -> None:
    """It is found also by who was given another runtime directory."""
    with script(shell, ARMED, FOREVER) as process:
        assert "found none loaded in it; wait until it trains" in shell.refuses("attach", process.pid)
        elsewhere = {**shell.environment, "XDG_RUNTIME_DIR": str(tmp_path)}
        assert "nothing watched in it" in shell.refuses("detach", process.pid, env=elsewhere)


def test_a_process_that_makes_no_step(shell: Shell) -> None:
    """Nothing of ours is left behind in it."""
    left = "print(len(o._global_optimizer_post_hooks), flush=True)"
    lines = (
        "import torch, importlib",
        "o = importlib.import_module('torch.optim.optimizer')",
        ARMED,
        f"input(); {left}",
    )
    with script(shell, *lines, stdin=subprocess.PIPE) as process:
        line = shell.refuses("attach", process.pid, "--timeout", 1)
        assert "expected the process to train, found no optimizer step" in line
        assert process.communicate("\n", timeout=240)[0] == "0\n"


def test_another_version_of_attnwatch(shell: Shell) -> None:
    with script(shell, "import attnwatch; attnwatch.__version__ = '99.1'", ARMED, FOREVER) as process:
        line = shell.refuses("attach", process.pid)
    assert f"expected attnwatch 99.1, which the process has, found {attnwatch.__version__}" in line
    assert f"use its own: {sys.executable} -m attnwatch" in line


def test_a_detach_where_nothing_was_attached(shell: Shell) -> None:
    with script(shell, FOREVER) as process:
        assert f"found nothing of it in {process.pid}" in shell.refuses("detach", process.pid)


def test_options_are_checked_before_anything_is_done(shell: Shell) -> None:
    timeouts = [["--timeout", text] for text in ("0", "-1", "nan", "inf", "soon")]
    file, port = ["--run", f"{__file__}/run"], ["--prometheus", "65536"]
    for options in (["--every", "0"], ["--rules", "no.toml"], ["--run", ""], file, port, *timeouts):
        assert "expected" in shell.refuses("attach", os.getpid(), *options)


def test_the_socket_is_private(shell: Shell) -> None:
    """A file of mode 0600 in a directory of mode 0700; gone when the process ends by itself."""
    folder = Path(shell.environment["XDG_RUNTIME_DIR"], f"attnwatch-{os.geteuid()}")
    with script(shell, ARMED, "input()", stdin=subprocess.PIPE) as process:
        socket = socket_path(folder, process.pid)
        assert [path.stat().st_mode & 0o777 for path in (folder, socket)] == [0o700, 0o600]
        process.communicate("\n")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["others can enter it", "a link", "a link to nothing", "a file"])
def test_a_directory_that_is_not_private_is_not_used(kind: str, shell: Shell, tmp_path: Path) -> None:
    """The script goes on unarmed, and says so. A link may lead to a directory of the user's own: another one set it."""
    folder = Path(shell.environment["XDG_RUNTIME_DIR"], f"attnwatch-{os.geteuid()}")
    match kind:
        case "others can enter it":
            folder.mkdir(mode=0o755)
        case "a file":
            folder.write_text("")
        case _:
            (tmp_path / "a link").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / kind)
    process = shell.start("-c", ARMED)
    said = process.communicate()[0]
    assert process.returncode == 0
    assert "not armed, so that nothing can attach: UsageError: expected a directory of your own with mode 0700" in said


def test_a_runtime_directory_that_is_of_no_use_is_passed_over(shell: Shell, tmp_path: Path) -> None:
    """One that is not there, is named from nowhere, or is too long for a socket: then the temporary directory."""
    temporary = shell.environment["XDG_RUNTIME_DIR"]
    (tmp_path / ("x" * 100)).mkdir()
    for useless in (tmp_path / "gone", tmp_path / ("x" * 100), "here"):
        shell.environment |= {"XDG_RUNTIME_DIR": str(useless), "TMPDIR": temporary}
        with script(shell, ARMED, "input()", stdin=subprocess.PIPE) as process:
            assert socket_path(Path(temporary, f"attnwatch-{os.geteuid()}"), process.pid).exists()
            assert "nothing watched in it" in shell.refuses("detach", process.pid)
            process.communicate("\n")


def test_what_a_killed_process_left_is_removed(shell: Shell) -> None:
    with script(shell, ARMED, FOREVER) as process:
        process.kill()
        process.wait()
    folder = Path(shell.environment["XDG_RUNTIME_DIR"], f"attnwatch-{os.geteuid()}")
    assert list(folder.iterdir()) == [socket_path(folder, process.pid)]
    with script(shell, ARMED, FOREVER) as other:
        assert list(folder.iterdir()) == [socket_path(folder, other.pid)]


def test_sockets_of_another_container_are_left_alone(shell: Shell) -> None:
    """It may share the directory, not the numbers of processes: a number that nobody has here may live there."""
    folder = Path(shell.environment["XDG_RUNTIME_DIR"], f"attnwatch-{os.geteuid()}")
    folder.mkdir(mode=0o700)
    theirs = folder / f"{2**22}-1.sock"
    theirs.touch()
    with script(shell, ARMED, FOREVER) as process:
        assert set(folder.iterdir()) == {theirs, socket_path(folder, process.pid)}


def test_arming_loads_no_torch_and_holds_no_signal(shell: Shell) -> None:
    code = (
        "import signal, sys; before = [signal.getsignal(s) for s in signal.valid_signals()]\n"
        f"{ARMED}; arm()\n"
        "print('torch' in sys.modules, before == [signal.getsignal(s) for s in signal.valid_signals()])"
    )
    assert shell.start("-c", code).communicate()[0] == "False True\n"


def test_python_3_14_needs_neither_arming_nor_a_debugger(shell: Shell, tmp_path: Path) -> None:
    """The process and the one who attaches run the same Python 3.14."""
    python = shutil.which("python3.14")
    if python is None or subprocess.run([python, "-c", "import torch, attnwatch"], capture_output=True).returncode:
        pytest.skip("needs a python3.14 with torch and attnwatch on the PATH")
    folder = tmp_path / "watched"
    folder.mkdir()
    process = subprocess.Popen([python, SCRIPT, "plain", folder], env=shell.environment)
    attach = ["attach", str(process.pid), "--run", str(tmp_path / "run"), "--every", "1"]
    try:
        for words in (attach, ["detach", str(process.pid)]):
            command = [python, "-m", "attnwatch", *words]
            assert subprocess.run(command, env=shell.environment, timeout=240).returncode == 0
        (folder / "stop").touch()
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
    assert attnwatch.open_run(tmp_path / "run").ended
