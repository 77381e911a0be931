"""Which revision of the trainer's code a run is of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE = 2.0
"""Seconds. A working tree on a slow network file system must not hold up a start."""


def revision() -> dict[str, Any] | None:
    """Git's revision of the running script (of the working directory, without one), and whether files differ from it.

    None where there is no git, no repository or no answer in time.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        place = Path(script).resolve().parent if script else Path.cwd()
        head = _git(place, "rev-parse", "HEAD")
        changed = _git(place, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": head, "dirty": bool(changed)}


def _git(place: Path, *arguments: str) -> str:
    # No lock on the index: a commit that the user makes at this moment must not fail.
    command = ["git", "--no-optional-locks", "-C", str(place), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout.strip()
