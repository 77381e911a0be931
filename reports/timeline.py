"""Loss and gradient norm over the steps, with every alert below them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.monitor.sample import SCALARS
from attnwatch.reports import charts, lanes
from attnwatch.reports.charts import Scale, element, fine, label, number, rule
from attnwatch.reports.curves import curve, pointed, points_of, scalar_scale
from attnwatch.reports.facts import counted, from_checkpoints, text
from attnwatch.reports.lanes import LANE, alert_lanes
from attnwatch.reports.summary import lead, lead_alert, onset

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run

WIDTH, GUTTER, RIGHT = 1040, 172, 18
MOST_SERIES = 6
"""Scalars that the script can read out."""
TOP, HEIGHT, STRIP, GAP, AXIS = 44, 200, 64, 26, 30


class Axes(NamedTuple):
    """What all runs of a page share. span: of the steps. gradient: None when no run passed a gradient norm. points: the
    most that a curve has."""

    span: tuple[float, float]
    loss: Scale
    gradient: Scale | None
    points: int

    @property
    def x(self) -> Scale:
        return Scale(*self.span, GUTTER, WIDTH - RIGHT)

    @property
    def bottom(self) -> float:
        """Of the curves, where the alerts begin."""
        return TOP + HEIGHT + (0 if self.gradient is None else GAP + STRIP)


def axes(runs: Sequence[Run], span: tuple[float, float]) -> Axes:
    gradient = None
    if any("grad_norm" in run.scalar_names for run in runs):
        gradient = scalar_scale(runs, "grad_norm", TOP + HEIGHT + GAP + STRIP, TOP + HEIGHT + GAP)
    return Axes(span, scalar_scale(runs, "loss", TOP + HEIGHT, TOP), gradient, points_of(len(runs)))


def timeline(run: Run, shared: Axes) -> Markup:
    """Loss, gradient norm, alerts, divergence and lead of one run."""
    rows = alert_lanes(run.alerts)
    x, bottom = shared.x, shared.bottom
    height = bottom + 14 + LANE * len(rows) + AXIS
    tops = [bottom + 14 + LANE * index for index in range(len(rows))]
    return charts.svg(
        WIDTH, height, f"Time line of {run.path.name}", described(run, shared, len(rows)),
        ground(shared, height - AXIS),
        *(rule(GUTTER, top + LANE / 2, WIDTH - RIGHT, top + LANE / 2, "grid") for top in tops),
        *(lanes.name(top, row) for top, row in zip(tops, rows, strict=True)),
        plot(
            height - AXIS,
            _divergence(run, x, bottom + 14 + LANE * len(rows)),
            _scalar(run, shared, shared.loss, "loss"),
            _scalar(run, shared, shared.gradient, "grad_norm") if shared.gradient else "",
            *(lanes.bars(top, row, x) for top, row in zip(tops, rows, strict=True)),
        ),
        *(
            _missing(name, (y.start + y.end) / 2, run)
            for name, y in (("loss", shared.loss), ("grad_norm", shared.gradient))
            if y is not None and name not in run.scalar_names
        ),
        class_="timeline", **zoomable(x),
    )  # fmt: skip


def described(run: Run, shared: Axes, rules: int) -> str:
    """The picture in words."""
    start, steps = onset(run), lead(run)
    first, last = shared.span
    said = f"Loss over steps {number(first)} to {number(last)} and {rules} rules that alerted"
    if start is not None:
        said += f"; the loss diverges from step {start:,}"
    if steps is not None:
        said += f", {abs(steps):,} steps {'after' if steps > 0 else 'before'} the alert on attention"
    return said + "."


def zoomable(x: Scale) -> dict[str, object]:
    """What the page's script needs to know of a picture's axis of steps."""
    return {"data_span": f"{x.low:.0f} {x.high:.0f}", "data_plot": f"{x.start} {x.end}"}


def plot(height: float, *children: object) -> Markup:
    """The part of a time line that moves along the steps, cut off at its edges."""
    left, width = GUTTER - 4, WIDTH - GUTTER + 4
    return charts.window(left, 0, width, height, *children)


def ground(shared: Axes, end: float) -> Markup:
    """Axes, grid and names: all that stays where it is."""
    parts = [charts.step_axis(shared.x, shared.x.ticks(8), TOP, end, end + 17)]
    parts.append(label(0, end + 17, "step", "tick", "start"))
    for name, scale in (("loss", shared.loss), ("grad_norm", shared.gradient)):
        if scale is not None:
            ticks = scale.ticks(4 if name == "loss" else 2)
            parts += [rule(GUTTER, scale.at(tick), WIDTH - RIGHT, scale.at(tick), "grid") for tick in ticks]
            parts += [label(GUTTER - 12, scale.at(tick) + 4, number(tick), "tick", "end") for tick in ticks]
            parts.append(label(0, scale.end + 4, name + (" (log)" if scale.log else ""), "lane-name", "start"))
            parts.append(rule(GUTTER, scale.start, WIDTH - RIGHT, scale.start, "base"))
    return element("g", *parts)


def series(run: Run, points: int) -> str:
    """JSON for the script: of each scalar the steps and values that a reader may point at."""
    names = sorted(run.scalar_names, key=lambda name: name not in SCALARS)[:MOST_SERIES]
    return json.dumps({text(name): pointed(*run.scalar(name), points) for name in names}, separators=(",", ":"))


def _scalar(run: Run, shared: Axes, y: Scale, name: str) -> Markup:
    if name not in run.scalar_names:
        return Markup("")
    steps, values = run.scalar(name)
    x = shared.x
    parts = [fine(*curve(x, y, steps, values, shared.points))]
    broken = steps[~np.isfinite(values)]
    if len(broken) and name == "loss":
        at = x.at(broken[0])
        room = at < WIDTH - RIGHT - 240
        said = label(at + (6 if room else -6), y.end + 32, _broken(steps, broken), "note", "start" if room else "end")
        parts += [rule(at, y.end, at, y.start, "broken"), said]
    return element("g", *parts)


def _broken(steps: NDArray[np.int64], broken: NDArray[np.int64]) -> str:
    """From when on there is no finite number, or at how many steps there was none where some came again."""
    if len(broken) == np.sum(steps >= broken[0]):
        return f"not finite from step {broken[0]:,}"
    return f"not finite at {counted(len(broken), 'step')}, first {broken[0]:,}"


def _missing(name: str, middle: float, run: Run) -> Markup:
    said = f"Saved weights know no {name}" if from_checkpoints(run) else f"The trainer passed no {name}"
    return label((GUTTER + WIDTH) / 2, middle, said, "empty")


def _divergence(run: Run, x: Scale, bottom: float) -> Markup:
    """The line where the loss begins to diverge, and the lead of the earliest alert before it."""
    start, ahead, first = onset(run), lead(run), lead_alert(run)
    if start is None:
        return Markup("")
    at = x.at(start)
    room = at < WIDTH - RIGHT - 132
    parts = [
        rule(at, TOP - 6, at, bottom, "onset"),
        label(at + (7 if room else -7), TOP + 13, f"loss diverges from {start:,}", "note", "start" if room else "end"),
    ]
    if ahead is not None and first is not None and ahead > 0:
        fired, y = x.at(start - ahead), TOP - 16
        parts += [
            element("rect", x=fired, y=TOP - 6, width=at - fired, height=HEIGHT + 6, class_="ahead"),
            rule(fired, TOP - 6, fired, bottom, "fired"),
            element("path", d=f"M{fired:.1f} {y + 6}V{y}H{at:.1f}V{y + 6}", class_="bracket"),
            label((fired + at) / 2, y - 8, f"{ahead:,} {'step' if ahead == 1 else 'steps'} of warning", "lead"),
            element("title", f"{first.rule} fired {ahead:,} steps before the loss began to diverge"),
        ]
    return element("g", *parts)
