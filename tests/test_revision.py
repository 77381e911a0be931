"""The revision of the trainer's code that a run is of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "import json; from attnwatch.monitor.revision import revision; print(json.dumps(revision()))"
WHO = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org"]


def git(place: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", place, *WHO, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def said(script: Path, cwd: Path) -> dict[str, object] | None:
    done = subprocess.run([sys.executable, script], cwd=cwd, capture_output=True, text=True, check=True)
    found: dict[str, object] | None = json.loads(done.stdout)
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    return tmp_path / "code" / "train.py"


def test_it_is_the_scripts_own_wherever_it_was_started(script: Path, tmp_path: Path) -> None:
    git(script.parent, "init", "-q")
    git(script.parent, "add", "train.py")
    git(script.parent, "commit", "-qm", "first")
    head = git(script.parent, "rev-parse", "HEAD")
    assert said(script, cwd=tmp_path) == {"revision": head, "dirty": False}
    script.write_text(SCRIPT + "\n")
    assert said(script, cwd=tmp_path) == {"revision": head, "dirty": True}


def test_without_a_repository_or_a_commit_there_is_none(script: Path, tmp_path: Path) -> None:
    assert said(script, cwd=tmp_path) is None
    git(script.parent, "init", "-q")
    assert said(script, cwd=tmp_path) is None
