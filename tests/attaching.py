"""A process that trains, and the command that attaches to it; both real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).with_name("attnwatch")
SCRIPT = Path(__file__).with_name("trainees.py")


class Shell:
    """Runs commands with a runtime directory of their own: sockets of others are not seen."""

    def __init__(self, runtime: Path):
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}

    def run(self, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
        more = {"env": self.environment, "timeout": 240, **more}
        return subprocess.run([str(COMMAND), *map(str, arguments)], capture_output=True, text=True, **more)

    def says(self, *arguments: object) -> str:
        """What a command that succeeds prints."""
        done = self.run(*arguments)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    def refuses(self, *arguments: object, **more: Any) -> str:
        """The one line of a command that ends with 2 and prints nothing else."""
        done = self.run(*arguments, **more)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        assert re.fullmatch(r"attnwatch: [^\n]+\n", done.stderr), done.stderr
        return done.stderr

    def start(self, *command: object, **more: Any) -> subprocess.Popen[str]:
        more = {"env": self.environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more}
        return subprocess.Popen([sys.executable, *map(str, command)], text=True, **more)


class Trainee:
    """One of tests/trainees.py, until it is stopped. before: arguments of Python in front of the script."""

    def __init__(self, shell: Shell, folder: Path, kind: str, *flags: str, before: Sequence[object] = ()):
        folder.mkdir()
        self.folder = folder
        self.process = shell.start(*before, SCRIPT, kind, folder, *flags)
        self.pid = self.process.pid

    def __enter__(self) -> Trainee:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def losses(self) -> list[float]:
        path = self.folder / "losses"
        return [float.fromhex(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    @property
    def left(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "left.json").read_text())
        return found

    def train(self, steps: int, seconds: float = 240) -> int:
        """Until so many more are done; how many are done then."""
        goal, end = len(self.losses) + steps, time.monotonic() + seconds
        while len(self.losses) < goal:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"no {steps} steps in {seconds} s"
            time.sleep(0.02)
        return len(self.losses)

    def end(self) -> str:
        """Have it end; what it has printed."""
        (self.folder / "stop").touch()
        said, _ = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, said
        return said
