"""Single numbers as predictors: one metric, one line, everything else as in the rule of the conjunction.

A head is bad beyond the line; a quarter of the heads, three samples in a row, make the alert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.rules import Rule
from attnwatch.monitor.run import Run

SHARE, HOLD = 0.25, 3


class Predictor(NamedTuple):
    """below: bad heads lie below the line."""

    metric: str
    below: bool

    def rule(self, line: float) -> Rule:
        if self.metric == "grad_norm":
            when = f"mean(grad_norm, 5) > {line!r} * lowest(mean(grad_norm, 5))"
        else:
            when = f"{self.metric} {'<' if self.below else '>'} {line!r}"
        return Rule(f"tuned.{self.metric}", "info", when, share=SHARE, hold=HOLD)

    def reach(self, run: Run) -> NDArray[np.float64]:
        """`[S]`: the line that would have fired by each sample, less favourable ones not; NaN before any could."""
        if self.metric == "grad_norm":
            return self._of_gradient(run)
        values = _held(run.metric(self.metric).reshape(len(run.steps), -1).astype(np.float64))
        sign = 1.0 if self.below else -1.0
        ordered = np.sort(sign * values, axis=1)  # NaN last
        known = np.isfinite(values).sum(1)
        needed = np.maximum(np.ceil(SHARE * known).astype(int), 1)
        worst = np.where(known > 0, np.take_along_axis(ordered, needed[:, None] - 1, 1)[:, 0], np.nan)
        return sign * _reached(worst)

    def _of_gradient(self, run: Run) -> NDArray[np.float64]:
        steps, norms = run.scalar("grad_norm")
        if len(norms) < 5:
            return np.full(len(run.steps), np.nan)
        means = np.convolve(norms, np.full(5, 0.2), "valid")
        lowest = np.fmin.accumulate(means)
        reached = -_reached(-means / lowest)
        at = np.searchsorted(steps[4:], run.steps, side="right") - 1
        return np.where(at >= 0, reached[np.maximum(at, 0)], np.nan)


PREDICTORS = (
    Predictor("entropy_ratio", below=True),
    Predictor("spread_ratio", below=False),
    Predictor("logit_max", below=False),
    Predictor("qk_rank_ratio", below=True),
    Predictor("qk_energy_top10", below=False),
    Predictor("layer_directions_90", below=True),
    Predictor("map_rank", below=True),
    Predictor("grad_norm", below=False),
)


def candidates(reaches: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Lines worth trying: two significant digits over the range that the runs show."""
    ends = np.array([x for reach in reaches for x in reach[np.isfinite(reach)][-1:]])
    tried = np.quantile(ends, np.linspace(0, 1, 201)) if len(ends) else ends
    return np.unique([float(f"{x:.2g}") for x in tried])


def crossing(predictor: Predictor, reach: NDArray[np.float64], line: float) -> int | None:
    """Index of the sample at which the line is crossed."""
    crossed = reach < line if predictor.below else reach > line
    return int(np.argmax(crossed)) if crossed.any() else None


def _held(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gaps of a column filled with what came before."""
    last = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values))[:, None], 0), axis=0)
    return np.take_along_axis(values, last, 0)


def _reached(worst: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lowest line so far below which HOLD values in a row lay; unknown ones neither count nor break the row."""
    reached, lowest = np.full(len(worst), np.nan), np.inf
    row: list[float] = []
    for number, x in enumerate(worst):
        if np.isfinite(x):
            row = [*row[1 - HOLD :], x]
            if len(row) == HOLD:
                lowest = min(lowest, max(row))
        if lowest < np.inf:
            reached[number] = lowest
    return reached
