"""How far the estimates of fewer rows stray, and whether fewer rows and fewer samples change the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.detection.recipe import Recipe
from benchmarks.detection.recipes import SANE_TEXT, TEXT, ramp
from benchmarks.detection.replay import replay
from benchmarks.detection.run import stored

from attnwatch.monitor.rules import Rule
from attnwatch.monitor.run import Run

ROWS = (16, 64, None)
EVERY = (1, 2, 5, 10, 20)

# 128 positions: 64 rows are half of them, 16 an eighth. Watching does not change training, so the runs of one base
# are the same training watched three times.
BASES = (
    replace(TEXT, name="long_high", length=128, layers=2, batch=4, rate=ramp(0.15, 300), steps=300),
    replace(TEXT, name="long_norm", length=128, layers=2, batch=4, rate=ramp(0.15, 300), steps=300, norm="rms"),
    replace(SANE_TEXT, name="long_sane", length=128, layers=2, batch=4, steps=300),
)
SAMPLED = tuple(
    replace(base, name=f"{base.name}_rows_{rows or 'all'}", reference="", every=1, rows=rows)
    for base in BASES
    for rows in ROWS
)
RELATIVE = ("logit_max", "spread_ratio", "map_rank")
ABSOLUTE = ("entropy_ratio", "first_key_mass", "sink_mass", "saturated_rows")


def groups(runs: Path) -> list[tuple[Recipe, list[Run]]]:
    """Each base whose runs are all there, with one run for each of ROWS."""
    found = []
    for base in BASES:
        members = [stored(recipe, runs) for recipe in SAMPLED if recipe.name.startswith(f"{base.name}_rows_")]
        there = [run for run in members if run is not None]
        if len(there) == len(ROWS):
            found.append((base, there))
    return found


def stray(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Of each metric the middle and the 95th percentile of its error with 16 and with 64 rows, in percent."""
    rows = []
    for name in (*ABSOLUTE, *RELATIVE):
        exact = runs[-1].metric(name)
        cells = []
        for run in runs[:-1]:
            error = np.abs(run.metric(name) - exact) / (np.abs(exact) if name in RELATIVE else 1)
            middle, high = np.nanpercentile(error, [50, 95])
            cells.append(f"{middle:.1%} / {high:.1%}")
        rows.append((f"`{name}`{' (relative)' if name in RELATIVE else ''}", *cells))
    return rows


def verdicts(runs: Sequence[Run], rules: Sequence[Rule]) -> list[tuple[str, ...]]:
    """When each rule would have fired, a row for each cadence and rule, a column for each of ROWS."""
    rows = []
    for every in EVERY:
        alerts = [replay(run, rules, thin=every) for run in runs]
        for rule in rules:
            fired = [
                [a.fired_step for a in found if a.rule == rule.name and a.fired_step is not None] for found in alerts
            ]
            rows.append((str(every), f"`{rule.name}`", *(str(min(steps)) if steps else "never" for steps in fired)))
    return rows
