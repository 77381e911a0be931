"""A number a step as a curve: its range where it is long, its running mean, and what a reader may point at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.reports import charts
from attnwatch.reports.charts import Floats, Scale, element, fine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnwatch.monitor.run import Run

SMOOTH = 20
"""Steps of the running mean that is drawn over the loss: the one that `loss_divergence` compares. Of a run shorter than
`SHORT` times that, fewer: the mean of the past would lie visibly behind the loss."""
SHORT = 40
POINTS = 1500
"""Most points of a curve: enough to stay sharp when a tenth of it fills the picture."""
ALL_POINTS, FEWEST = 20_000, 150
"""Of the curves of all runs of a page together, and the fewest that a curve has all the same."""


def points_of(runs: int) -> int:
    """Points a curve where a page has that many runs."""
    return min(POINTS, max(FEWEST, ALL_POINTS // runs))


def scalar_scale(runs: Iterable[Run], name: str, start: float, end: float) -> Scale:
    """The axis that all runs of a page share: logarithmic when the values span more than a factor of 30."""
    values = [run.scalar(name)[1] for run in runs if name in run.scalar_names]
    low_high = charts.log_limits(*values, spread=30)
    low, high = low_high or charts.limits(*values)
    return Scale(low, high, start, end, log=low_high is not None)


def running_mean(values: Floats, width: int = SMOOTH) -> Floats:
    """Mean of the last `width` values, of all there are before that; NaN while one of them is not finite."""
    known = np.isfinite(values)
    mean: Floats = _sums(np.where(known, values, 0.0), width) / np.minimum(np.arange(1, len(values) + 1), width)
    return np.where(_sums((~known).astype(np.float64), width) > 0, np.nan, mean)


def _sums(values: Floats, width: int) -> Floats:
    """Sum of the last `width` values. Nothing is taken away again: after a spike of 1e20 nothing would be left."""
    count = len(values)
    blocks = np.pad(values, (0, -count % width)).reshape(-1, width)
    upto = np.cumsum(blocks, axis=1).ravel()[:count]  # from the beginning of each one's block
    since = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()  # to the end of it
    begins = np.arange(count) - width + 1
    spans_two = (begins > 0) & (begins % width > 0)
    return upto + np.where(spans_two, since[np.maximum(begins, 0)], 0.0)


def smooth(values: Floats, points: int) -> Floats:
    """The running mean of what is finite, as wide as `loss_divergence` has it; wider in a long run, less in a short."""
    bounded = np.clip(np.where(np.isfinite(values), values, np.nan), -charts.LARGEST, charts.LARGEST) / len(values)
    width = max(1, min(SMOOTH, len(values) // SHORT), 2 * len(values) // points)
    return running_mean(bounded, width) * len(values)


def curve(x: Scale, y: Scale, steps: NDArray[np.int64], values: Floats, points: int) -> list[Markup]:
    """The values and their running mean; of a long run the range in each of `points` groups and the mean there."""
    if not len(values):
        return []
    known, mean = np.where(np.isfinite(values), values, np.nan), smooth(values, points)
    if len(values) <= points:
        raw = element("path", d=charts.path(x(steps), y(known)), class_="raw")
        return [raw, element("path", d=charts.path(x(steps), y(mean)), class_="loss")]
    starts = charts.bins(len(values), points)
    low, high = np.fmin.reduceat(known, starts), np.fmax.reduceat(known, starts)
    last = np.append(starts[1:], len(values)) - 1
    return [
        element("path", d=charts.area(x(steps[last]), y(low), y(high)), class_="envelope"),
        element("path", d=charts.path(x(steps[last]), y(mean[last])), class_="loss"),
    ]


def mean_line(
    x: Scale, y: Scale, steps: NDArray[np.int64], values: Floats, points: int, **attributes: object
) -> Markup:
    """Only the running mean, for pictures that hold several runs."""
    if not len(values):
        return Markup("")
    at = charts.bins(len(values), points)
    return fine(element("path", d=charts.path(x(steps[at]), y(smooth(values, points)[at])), **attributes))


def pointed(steps: NDArray[np.int64], values: Floats, points: int) -> list[list[float | None]]:
    """Steps and values that the script reads out: the ends, and of each stretch between the highest value."""
    if len(steps) > points:
        starts = charts.bins(len(steps), points)
        ends = [*starts[1:], len(steps)]
        at = [
            a + int(np.argmax(np.where(np.isnan(values[a:b]), np.inf, values[a:b])))
            for a, b in zip(starts, ends, strict=True)
        ]
        steps, values = steps[at], values[at]
    known = np.isfinite(values)
    return [
        steps.tolist(),
        [float(f"{value:.4g}") if fine else None for value, fine in zip(values.tolist(), known, strict=True)],
    ]  # fmt: skip


def some_points(run: Run, name: str, rows: int) -> list[tuple[int, float]]:
    """A few points of a scalar, for the table under its curve; the last one among them."""
    if name not in run.scalar_names:
        return []
    steps, values = run.scalar(name)
    at = np.unique(np.linspace(0, max(len(steps) - 1, 0), rows).round().astype(int))[: len(steps)]
    return [(int(steps[row]), float(values[row])) for row in at]
