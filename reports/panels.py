"""Small multiples: one metric by layer over the steps, and the history of single heads."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.reports import charts
from attnwatch.reports.charts import Floats, Scale, element, fine, label, number, rule
from attnwatch.reports.summary import main_alert, onset
from attnwatch.reports.words import UNIT_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnwatch.monitor.run import Run
    from attnwatch.monitor.sample import Metric

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 156, 38, 8, 10, 22
DEPTHS = 8
"""Colours of depth in the style sheet: d0 the first layers, d7 the last."""
TABLE_ROWS = 12
FLATTENING, DECADES = 1e3, 1e6
"""Largest value from which a linear axis would press all the others flat, so that values of zero and below (of signed
logits) may lie on the edge of a logarithmic one; and how far that reaches down."""


Bounds = tuple[NDArray[np.float32], NDArray[np.float32]]
"""The least and the largest `[S, L, H]` of the samples that each sample stands for."""


@dataclass(frozen=True)
class Detail:
    """How finely lines are drawn, so that a page keeps its size: points a line and layers a chart. pointed: samples of
    a chart whose values the page's script knows."""

    points: int
    layers: int
    pointed: int = 96


@dataclass(frozen=True, eq=False)
class Reduced:
    """One metric of one run, thinned for drawing: a row for each group of samples, at the step of its last one.

    lines: `[P, K]` median over heads of K layers at that step; low, high: `[P]` over all heads and all samples of the
    group; rows: of some samples (step, lowest, median, highest) over all heads, for the reader who points at one.
    """

    steps: Floats
    lines: Floats
    depth: tuple[float, ...]
    low: Floats
    high: Floats
    rows: tuple[tuple[int, float, float, float], ...]

    @property
    def table(self) -> tuple[tuple[int, float, float, float], ...]:
        """A few of the rows, the first and the last among them: what stands under the chart."""
        at = np.unique(np.linspace(0, len(self.rows) - 1, TABLE_ROWS).round().astype(int)) if self.rows else ()
        return tuple(self.rows[row] for row in at)


def reduce(
    steps: NDArray[np.int64], values: NDArray[np.float32], metric: Metric, detail: Detail, bounds: Bounds | None = None
) -> Reduced:
    """Thin `values [S, L, H]`. A metric of the weights is known until it is measured again: its gaps are no gaps.

    bounds: where a sample stands for more than itself.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    if metric.merge == "last":
        measured = np.isfinite(values).any(axis=(1, 2))
        steps, values = steps[measured], values[measured]
        bounds = bounds and (bounds[0][measured], bounds[1][measured])
    least, largest = (np.where(np.isfinite(bound), bound, np.nan) for bound in bounds) if bounds else (values, values)
    samples, layers = values.shape[:2]
    if not samples or not np.isfinite(values).any():
        nothing = np.zeros(0)
        return Reduced(nothing, np.zeros((0, 0)), (), nothing, nothing, ())
    starts = charts.bins(samples, detail.points)
    last = np.append(starts[1:], samples) - 1
    drawn = np.unique(np.linspace(0, layers - 1, min(layers, detail.layers)).round().astype(int))
    flat = values.reshape(samples, -1)
    some = last[np.unique(np.linspace(0, len(last) - 1, detail.pointed).round().astype(int))]
    lowest, highest = np.fmin.reduce(flat[some], axis=1), np.fmax.reduce(flat[some], axis=1)
    return Reduced(
        steps[last].astype(np.float64),
        median(values[np.ix_(last, drawn)]),
        tuple(float(layer) / max(layers - 1, 1) for layer in drawn),
        np.fmin.reduceat(np.fmin.reduce(least, axis=(1, 2)), starts).astype(np.float64),
        np.fmax.reduceat(np.fmax.reduce(largest, axis=(1, 2)), starts).astype(np.float64),
        tuple(
            (int(step), float(low), float(middle), float(high))
            for step, low, middle, high in zip(steps[some], lowest, median(flat[some]), highest, strict=True)
        ),
    )  # fmt: skip


def median(values: NDArray[np.floating]) -> Floats:
    """Median of the values that are not NaN, along the last axis; NaN where there is none."""
    ordered = np.sort(values, axis=-1)  # NaN sorts last
    count = np.sum(~np.isnan(ordered), axis=-1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[-1] - 1), axis=-1)
    middle: Floats = np.where(count > 0, (low.astype(np.float64) + high) / 2, np.nan)[..., 0]
    return middle


@dataclass(frozen=True)
class Threshold:
    value: float
    severity: str
    rule: str


def comparisons(metric: str, rules: Iterable[dict[str, str]]) -> Iterator[tuple[str, Threshold]]:
    """Each number alone that a rule's condition compares this metric with, and on which side ("<" or ">") it is met."""
    pattern = re.compile(
        rf"(?<![\w.]){re.escape(metric)}\s*([<>])=?\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?![\w.])(?!\s*[-+*/])"
    )
    for each in rules:
        for match in pattern.finditer(each["when"]):
            yield match[1], Threshold(float(match[2]), each["severity"], each["name"])


def thresholds(metric: str, rules: Iterable[dict[str, str]]) -> list[Threshold]:
    """Numbers that the rules in force compare this metric with, the gravest rule's first."""
    order = {"critical": 0, "warning": 1}
    found: dict[float, Threshold] = {}
    for _, each in sorted(comparisons(metric, rules), key=lambda pair: order.get(pair[1].severity, 2)):
        found.setdefault(each.value, each)
    return list(found.values())


def healthy_band(metric: str, rules: Iterable[dict[str, str]]) -> tuple[float, float] | None:
    """The values that no critical rule asks for, infinite on a side without a line; None where there is no such band.

    A head outside it is not ill yet: a critical rule asks several numbers at once, and of many heads.
    """
    lines = [(side, line.value) for side, line in comparisons(metric, rules) if line.severity == "critical"]
    low = max((value for side, value in lines if side == "<"), default=-math.inf)
    high = min((value for side, value in lines if side == ">"), default=math.inf)
    return (low, high) if lines and low < high else None


def value_scale(name: str, parts: Sequence[Reduced], lines: Sequence[Threshold]) -> Scale:
    """The axis that all runs share: [0, 1] where the metric lives there, log where it spans decades."""
    start, end = HEIGHT - BOTTOM, TOP
    if name in UNIT_INTERVAL:
        return Scale(0.0, 1.0, start, end)
    medians = np.concatenate([part.lines.ravel() for part in parts])
    highest = np.concatenate([part.high for part in parts])
    lowest = np.concatenate([part.low for part in parts])
    positive = charts.finite(medians, highest[highest > 0])
    if positive.size and positive.max() >= FLATTENING:
        positive = positive[positive > positive.max() / DECADES]
    limits = charts.log_limits(positive, spread=50)
    if limits is not None:
        return Scale(*limits, start, end, log=True)
    low, high = charts.limits(lowest, highest)
    near = [line.value for line in lines if low - (high - low) < line.value < high + (high - low)]
    return Scale(*charts.limits([low, high], near, pad=0.0 if not near else 0.02), start, end)


def panel(
    run: Run, name: str, part: Reduced, span: tuple[float, float], y: Scale, lines: Sequence[Threshold],
    band: tuple[float, float] | None = None,
) -> Markup:  # fmt: skip
    """One metric of one run: a line a layer, the range over all heads behind them, the rules' lines and the band that
    is healthy to them."""
    x = Scale(*span, LEFT, WIDTH - RIGHT)
    last = part.rows[-1] if part.rows else None
    told = (
        f"At step {last[0]:,} the lowest head has {number(last[1])}, the median {number(last[2])}, "
        f"the highest {number(last[3])}."
        if last
        else "Not measured in this run."
    )
    return charts.svg(
        WIDTH, HEIGHT, f"{name} by layer, {run.path.name}", told,
        *([] if band is None else [_band(band, y)]),
        *(rule(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick), "grid") for tick in y.ticks(3)),
        *(label(LEFT - 6, y.at(tick) + 3.5, number(tick), "tick", "end") for tick in y.ticks(3)),
        rule(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "base"),
        charts.step_axis(x, x.ticks(4), HEIGHT - BOTTOM, HEIGHT - BOTTOM, HEIGHT - 7),
        charts.window(
            LEFT - 4, 0, WIDTH - LEFT + 4, HEIGHT,
            _moments(run, x),
            fine(
                element("path", d=charts.area(x(part.steps), y(part.low), y(part.high)), class_="envelope"),
                *(
                    element("path", d=charts.path(x(part.steps), y(line)), class_=f"d{round(depth * (DEPTHS - 1))}")
                    for line, depth in zip(part.lines.T, part.depth, strict=True)
                ),
            ),
        ),
        *(_threshold(line, y) for line in lines if y.holds(line.value)),
        *([] if part.rows else [label((LEFT + WIDTH) / 2, HEIGHT / 2, "not measured", "empty")]),
        class_="panel" if len(part.steps) > 1 else "panel dots",
        data_span=f"{x.low:.0f} {x.high:.0f}", data_plot=f"{x.start} {x.end}",
        data_rows=_pointed(part) if part.rows else None,
    )  # fmt: skip


def _pointed(part: Reduced) -> str:
    """JSON of what the script reads out: steps, lowest, median and highest."""

    def short(value: float) -> float | None:
        return float(f"{value:.3g}") if math.isfinite(value) else None

    return json.dumps([[row[0], *map(short, row[1:])] for row in part.rows], separators=(",", ":"))


def _band(band: tuple[float, float], y: Scale) -> Markup:
    low, high = (float(np.clip(value, y.low, y.high)) for value in band)
    bottom, top = y.at(low), y.at(high)
    title = element("title", f"Healthy to the critical rules: {_range(band)}")
    shape = element("rect", x=LEFT, y=top, width=WIDTH - RIGHT - LEFT, height=max(bottom - top, 0.0), class_="band")
    return element("g", title, shape)


def _range(band: tuple[float, float]) -> str:
    low, high = band
    if math.isinf(low):
        return f"up to {number(high)}"
    return f"from {number(low)} on" if math.isinf(high) else f"{number(low)} to {number(high)}"


def _threshold(line: Threshold, y: Scale) -> Markup:
    return element(
        "g",
        element("title", f"{line.rule} ({line.severity}) compares with {number(line.value)}"),
        rule(LEFT, y.at(line.value), WIDTH - RIGHT, y.at(line.value), f"threshold {line.severity}"),
    )


def _moments(run: Run, x: Scale) -> Markup:
    """Thin uprights where the main alert fired and where the loss began to diverge."""
    alert, start = main_alert(run), onset(run)
    marks = []
    if alert is not None and alert.fired_step is not None and alert.rule != "loss_divergence":
        marks.append(rule(x.at(alert.fired_step), TOP, x.at(alert.fired_step), HEIGHT - BOTTOM, "fired"))
    if start is not None:
        marks.append(rule(x.at(start), TOP, x.at(start), HEIGHT - BOTTOM, "onset"))
    return element("g", *marks)


def sparkline(
    title: str, steps: NDArray[np.int64], values: NDArray[np.floating], y: Scale, line: float | None, fired: float
) -> Markup:
    """The history of one head, `values [S]`, with the threshold it was compared with and the step the alert fired."""
    known = np.isfinite(values)
    last = f"Last value {number(float(values[known][-1]))}." if known.any() else "Not measured."
    x = Scale(*charts.span(steps[0], steps[-1]), 1, 149)
    at, level = charts.thin(steps[known], values[known], 120)
    return charts.svg(
        150, 30, title, last,
        rule(x.at(fired), 1, x.at(fired), 29, "fired"),
        *([rule(1, y.at(line), 149, y.at(line), "threshold")] if line is not None and y.holds(line) else []),
        fine(element("path", d=charts.path(x(at), y(level)), class_="spark")),
        class_="sparkline",
    )  # fmt: skip
