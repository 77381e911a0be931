"""A run read on as it grows: each look reads only what came since the last one."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnwatch.monitor.history import Heads
from attnwatch.monitor.run import EVENTS, HEADER, SAMPLES, SCALARS, Run, open_run
from attnwatch.monitor.sample import UsageError, unproved

PACED = 20
"""Newest samples whose median distance in time is the pace of the run."""

SILENT = 5.0
"""Paces without a sample that are silence. An evaluation between two samples is shorter as a rule."""

ALWAYS_SILENT = 300.0
"""Seconds that are silence while a run is too young to have a pace."""

SOONEST = 10.0
"""Seconds: no shorter wait is silence, however fast the samples came."""

_RANK = re.compile(r"rank(\d{5,})")


class Found(NamedTuple):
    """A run directory, and what has to be said of how it was chosen; "" for nothing."""

    path: Path
    note: str


def find_run(path: Path) -> Found | None:
    """The run at a path, or the newest right in it (of several ranks the first); None while there is none.

    Raises UsageError for a path that can never be a run.
    """
    if path.name == HEADER or (path / HEADER).exists():
        return Found(path, "")
    if path.exists() and not path.is_dir():
        raise UsageError(f"expected a run directory, found the file {str(path)!r}; give what was passed as run=")
    began: dict[Path, float] = {}
    for header in path.glob(f"*/{HEADER}"):
        with suppress(OSError):  # gone since
            began[header.parent] = header.stat().st_mtime
    if not began:
        return None
    if all(_RANK.fullmatch(run.name) for run in began):
        first = min(began, key=lambda run: run.name)
        return Found(first, f"{first.name}, one of {len(began)} ranks recorded apart")
    newest = max(began, key=lambda run: (began[run], run.name))
    return Found(newest, f"the newest of {len(began)} runs in {path}" if len(began) > 1 else "")


class Follower:
    """Follows one run.

    run: as it was at the last look. heads: each head's newest numbers. trouble: why the last look could not be taken
    (`run` is then the one before), "" when it could.
    """

    run: Run
    heads: Heads
    trouble: str

    def __init__(self, path: Path) -> None:
        """Reads all there is. Raises UsageError when there is no run, or none that this version can read."""
        self._see(open_run(path), None)

    def look(self) -> None:
        """Reads what came since. Raises nothing: a directory that is away for a moment may come back."""
        try:
            self._see(open_run(self.run.path, before=self.run), self.run)
        except (UsageError, OSError) as error:
            self.trouble = str(error)

    @property
    def ranks(self) -> int:
        """How many ranks left records: files of their own in samples/, or runs of their own in the directory."""
        names: set[str] = set()
        with suppress(OSError):
            names |= {name.split("-")[0] for name in os.listdir(self.run.path / SAMPLES)}
            names |= {header.parent.name for header in self.run.path.glob(f"rank*/{HEADER}")}
        return max(1, sum(_RANK.fullmatch(name) is not None for name in names))

    @property
    def pace(self) -> float:
        """Seconds from sample to sample; NaN before the third."""
        gaps = np.diff(self.run.times[-PACED:])
        return float(np.median(gaps)) if len(gaps) > 1 else np.nan

    def is_silent(self, now: float) -> bool:
        """Whether a run that has not ended should have left a sample by now. now: unix seconds."""
        if self.run.ended:
            return False
        began = self.run.times[-1] if len(self.run.times) else self.written
        pace = self.pace
        return bool(now - began > (ALWAYS_SILENT if np.isnan(pace) else max(SILENT * pace, SOONEST)))

    @property
    def written(self) -> float:
        """When scalars or events were last written, unix seconds; NaN when unknown."""
        times = []
        for name in (SCALARS, EVENTS):
            with suppress(OSError):
                times.append((self.run.path / name).stat().st_mtime)
        return max(times, default=np.nan)

    def _see(self, run: Run, before: Run | None) -> None:
        self.run, self.trouble = run, ""
        if before is None or before.metrics != run.metrics or before.header.get("created") != run.header.get("created"):
            self.heads = Heads(run.metrics)
            first = len(run.steps) - _cycle(run) - 1  # the weights' numbers are in one sample of a cycle
        else:
            seen = before.steps[-1] if len(before.steps) else -1
            first = int(np.searchsorted(run.steps, seen, side="right"))
        for sample in run.iter_samples(max(first, 0)):
            self.heads.take(sample, unproved(run.coverage))


def _cycle(run: Run) -> int:
    options = run.header.get("options")
    every = options.get("spectrum_every") if isinstance(options, dict) else None
    return every if isinstance(every, int) and 0 < every < 1000 else 5
