"""When single numbers crossed their lines (monitor/predictors.toml), for a whole run at once.

Arithmetic on all samples at once: asking the rule engine sample by sample takes minutes on a run of two million steps.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.predictors import Crossing, predictors
from attnwatch.reports.known import forgotten, held

if TYPE_CHECKING:
    from attnwatch.monitor.rules import Rule
    from attnwatch.monitor.run import Run

_LINE = re.compile(r"(?P<name>\w+) (?P<side>[<>]) (?P<number>[\d.e+-]+)(?P<lowest> \* lowest\((?P=name)\))?")


def crossings(run: Run) -> list[Crossing]:
    """Of every predictor, the first to cross first; those that did not cross come last."""
    lines = {rule.name: (rule, _parsed(rule)) for rule in predictors()}
    metrics = {
        metric.name: metric for metric in run.metrics if metric.name in {line["name"] for _, line in lines.values()}
    }
    values = {name: run.metric(name) for name in metrics}
    # A head that gave nothing this time has no spectrum either, whatever was known of it before.
    present = np.logical_or.reduce([~np.isnan(each) for each in values.values()]) if values else np.zeros(0, np.bool_)
    gone = forgotten(run)
    found = []
    for rule, line in lines.values():
        name = line["name"]
        if name in metrics:
            known = values[name]
            if metrics[name].merge == "last":
                known = np.where(present, held(known, gone), np.nan)
            steps, share = run.steps, _share(known, line)
            measured = np.asarray(np.isfinite(values[name]).any(axis=(1, 2)))
        elif name in run.scalar_names:
            steps, passed = run.scalar(name)
            share, measured = _share(passed[:, None, None], line), np.ones(len(steps), np.bool_)
        else:
            steps, share, measured = run.steps[:0], np.zeros(0), np.zeros(0, np.bool_)
        found.append(_crossing(rule, steps, share, measured))
    return sorted(found, key=lambda crossing: math.inf if crossing.step is None else crossing.step)


def _parsed(rule: Rule) -> re.Match[str]:
    line = _LINE.fullmatch(rule.when)
    assert line is not None, f"predictors.toml: {rule.when}"
    return line


def _share(values: NDArray[np.floating], line: re.Match[str]) -> NDArray[np.float64]:
    """`[S]`: of the heads `[S, L, H]` whose number is known, the share past the line; NaN where none is."""
    limit: float | NDArray[np.floating] = float(line["number"])
    with np.errstate(all="ignore"):
        if line["lowest"]:
            limit = limit * np.fmin.accumulate(np.where(np.isfinite(values), values, np.nan), axis=0)
        past = values < limit if line["side"] == "<" else values > limit
        known = np.count_nonzero(~(np.isnan(values) | np.isnan(limit)), axis=(1, 2))
        share: NDArray[np.float64] = np.count_nonzero(past, axis=(1, 2)) / known
    return share


def _crossing(
    rule: Rule, steps: NDArray[np.int64], share: NDArray[np.float64], measured: NDArray[np.bool_]
) -> Crossing:
    """Where the share was large enough `hold` times in a row, of the samples at which it is known."""
    known = ~np.isnan(share)
    steps_known, met = steps[known], (share[known] > 0) & (share[known] >= rule.share)
    held_for = (
        np.lib.stride_tricks.sliding_window_view(met, rule.hold).all(axis=1) if len(met) >= rule.hold else met[:0]
    )
    first = int(np.argmax(held_for)) if held_for.any() else None
    step = None if first is None else int(steps_known[first + rule.hold - 1])
    began = steps[measured][:1].tolist()
    from_start = first is not None and began == [steps_known[first]]
    return Crossing(rule.name, step, rule.when, bool(began), from_start)
