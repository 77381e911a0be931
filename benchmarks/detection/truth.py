"""What really became of a run, by its loss and by what its heads were like when it failed; no rule is asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from benchmarks.detection.models import CLASSES
from benchmarks.detection.recipe import (
    COLLAPSES,
    DIVERGES,
    HEALTHY,
    OVERFLOWS,
    SINKS_LOST,
    SPIKES,
    UNIFORM,
    Recipe,
)
from numpy.typing import NDArray

from attnwatch.monitor.run import Run

IMPAIRED = "impaired"
"""Learns worse than its reference while its attention looks as attention may: neither failure nor health is claimed."""

WINDOW, PATIENCE = 20, 40
"""Divergence: the mean of WINDOW losses above its lowest by RISE, PATIENCE steps in a row; or a loss that is none."""
FINAL = 100
"""Steps whose mean loss is the final loss."""
MARGIN = 0.1
"""Nats by which a final loss may exceed the reference's before it counts as worse."""
QUARTER = 0.25


def rise(recipe: Recipe) -> float:
    return 0.5 if recipe.data in CLASSES else 0.3


@dataclass(frozen=True)
class Truth:
    """label: what happened, one of the names of recipe.py or IMPAIRED. onset: first step of divergence.

    final: mean loss of the last FINAL steps that had one. worse: how much above the reference's at the same steps, or
    without a reference above the run's own lowest. saturated: share of heads of which most rows look at one key, how
    much above the first sample's when divergence was sure (or else at the end), and at the end.
    sinks: share of heads that look at the first key, highest and at the end. uniform: median entropy_ratio, lowest
    and at the end. nonfinite: first step without a finite loss.
    """

    label: str
    onset: int | None
    final: float
    worse: float
    saturated: tuple[float, float]
    sinks: tuple[float, float]
    uniform: tuple[float, float]
    nonfinite: int | None

    @property
    def void(self) -> int | None:
        """From which step on alerts about attention are neither right nor wrong.

        There is nothing to say once the loss is no number, nor when it diverged first and took the heads with it."""
        return self.onset if self.label == SPIKES and self.saturated[1] >= QUARTER else self.nonfinite


def find(recipe: Recipe, run: Run, reference: Run | None) -> Truth:
    """reference: the stored run of `recipe.reference`."""
    steps, losses = run.scalar("loss")
    start, bad = onset(steps, losses, rise(recipe))
    finite = losses[np.isfinite(losses)]
    final = float(finite[-FINAL:].mean())
    if reference is None:
        best = float(_means(finite, FINAL).min(initial=np.inf))
    else:
        best = float(reference.scalar("loss")[1][: len(finite)][-FINAL:].mean())
    until = run.steps <= (steps[-1] if bad is None else bad)
    one_key = _share(run, "saturated_rows", 0.5)
    at_failure = _last(one_key, until & (run.steps <= (steps[-1] if start is None else start + PATIENCE)), 3)
    saturated = at_failure - one_key[0], _last(one_key, until, 3)
    # Every head that gives its first key most of its weight is a sink; what a run begins with counts as much.
    sinks = _share(run, "first_key_mass", 0.5)
    entropy = run.metric("entropy_ratio").reshape(len(run.steps), -1)
    median = np.nanmedian(np.where(until[:, None], entropy, 1.0), axis=1)
    lost = (float(np.nanmax(sinks[until])), _last(sinks, until, 5))
    flat = (float(np.nanmin(median[until])), _last(median, until, 5))
    truth = Truth("", start, final, final - best, saturated, lost, flat, bad)
    return Truth(_label(recipe, truth), *list(vars(truth).values())[1:])


def _label(recipe: Recipe, x: Truth) -> str:
    if x.onset is None and x.worse < MARGIN:
        return HEALTHY
    if x.saturated[0] >= QUARTER:
        if x.onset is None:
            return COLLAPSES
        return OVERFLOWS if recipe.call == "half" and x.nonfinite is not None else DIVERGES
    if x.uniform[1] > 0.9 and x.uniform[0] < 0.8:
        return UNIFORM
    if x.sinks[0] >= QUARTER and x.sinks[1] < x.sinks[0] / 2:
        return SINKS_LOST
    return IMPAIRED if x.onset is None else SPIKES


def onset(steps: NDArray[np.int64], losses: NDArray[np.float64], rise: float) -> tuple[int | None, int | None]:
    """First step of divergence, first step without a finite loss."""
    wrong = np.flatnonzero(~np.isfinite(losses))
    bad = int(steps[wrong[0]]) if len(wrong) else None
    sound = losses[: wrong[0]] if len(wrong) else losses
    means = _means(sound, WINDOW)
    high = means > np.minimum.accumulate(means) + rise
    streak = 0
    for number, is_high in enumerate(high):
        streak = streak + 1 if is_high else 0
        if streak == PATIENCE:
            return int(steps[number - PATIENCE + WINDOW]), bad
    return bad, bad


def _means(x: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    return np.convolve(x, np.full(n, 1 / n), "valid") if len(x) >= n else np.zeros(0)


def _share(run: Run, metric: str, above: float) -> NDArray[np.float64]:
    """`[S]`: in how many of the known heads a metric is above a line."""
    values = run.metric(metric).reshape(len(run.steps), -1)
    known = np.isfinite(values)
    shares: NDArray[np.float64] = ((values > above) & known).sum(1) / np.maximum(known.sum(1), 1)
    return np.where(known.any(1), shares, np.nan)


def _last(series: NDArray[np.float64], until: NDArray[np.bool_], samples: int) -> float:
    """Median of the last few finite values."""
    known = series[until & np.isfinite(series)]
    return float(np.median(known[-samples:])) if len(known) else np.nan
