"""Which runs the paths of a command line stand for: `runs/*` holds more than runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attnwatch.monitor.run import HEADER, Run, open_run
from attnwatch.monitor.sample import UsageError


def open_runs(paths: Sequence[Path]) -> tuple[list[Run], list[Path]]:
    """The runs, and the paths that were left out because they are none.

    A directory without run.json stands for the runs right in it, by name. Of several paths those that are there and
    stand for no run are left out. Raises UsageError for a path that does not exist, for a run that cannot be read, for
    a single path that is no run, and when there is no run at all.
    """
    if len(paths) == 1:
        return [open_run(path) for path in _runs_at(paths[0]) or paths], []
    found = {path: _runs_at(path) for path in paths}
    others = [path for path, runs in found.items() if not runs and path.exists()]
    runs = [open_run(run) for path in paths if path not in others for run in found[path] or [path]]
    if not runs:
        raise UsageError(
            f"expected run directories, found none in {listed(others)}; give those that were passed as run="
        )
    return runs, others


def listed(paths: Iterable[Path], most: int = 8) -> str:
    """The first of them by name, and how many more there are."""
    names = [str(path) for path in paths]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _runs_at(path: Path) -> list[Path]:
    """The path itself if it is a run, or the runs right in it; else none."""
    if path.name == HEADER or (path / HEADER).exists():
        return [path]
    return sorted(header.parent for header in path.glob(f"*/{HEADER}")) if path.is_dir() else []
