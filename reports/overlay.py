"""The losses and gradient norms of several runs in one picture, each with its main alert and its divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from attnwatch.reports import charts
from attnwatch.reports.charts import Scale, element, rule
from attnwatch.reports.curves import mean_line
from attnwatch.reports.facts import names
from attnwatch.reports.summary import main_alert, onset
from attnwatch.reports.timeline import AXIS, WIDTH, Axes, ground, plot, zoomable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnwatch.monitor.run import Run

COLOURS = 6
"""Of the style sheet, r0 to r5. The dashes tell apart runs that share one, and those that look alike to somebody."""
DASHES = (None, "7 3", "2 3", "10 3 2 3")


class Line(NamedTuple):
    """How a run is drawn. class_: its colour in the style sheet."""

    name: str
    class_: str
    dash: str | None


def lines(runs: Sequence[Run]) -> list[Line]:
    return [
        Line(name, f"r{index % COLOURS}", DASHES[(index + index // COLOURS) % len(DASHES)])
        for index, name in enumerate(names(runs))
    ]


def overlay(runs: Sequence[Run], shared: Axes) -> Markup:
    """Running means only: a triangle where the main alert fired, a cross where the loss began to diverge."""
    x, height = shared.x, shared.bottom + AXIS
    said = [f"{run.path.name}{_said(run)}" for run in runs]
    return charts.svg(
        WIDTH, height, f"Losses of {len(runs)} runs", f"Running means over the same steps: {'; '.join(said)}.",
        ground(shared, shared.bottom),
        plot(
            shared.bottom,
            *(_run(run, line, x, shared) for run, line in zip(runs, lines(runs), strict=True)),
        ),
        class_="timeline overlay", **zoomable(x),
    )  # fmt: skip


def _said(run: Run) -> str:
    alert, start = main_alert(run), onset(run)
    fired = "" if alert is None else f", {alert.rule} fired at step {alert.fired_step:,}"
    return fired + ("" if start is None else f", diverged from step {start:,}")


def _run(run: Run, line: Line, x: Scale, shared: Axes) -> Markup:
    parts: list[object] = [element("title", run.path.name + _said(run))]
    for name, y in (("loss", shared.loss), ("grad_norm", shared.gradient)):
        if y is not None and name in run.scalar_names:
            drawn = mean_line(x, y, *run.scalar(name), shared.points, class_="mean", stroke_dasharray=line.dash)
            parts.append(drawn)
    alert, start = main_alert(run), onset(run)
    if alert is not None and alert.fired_step is not None:
        at, y_at = x.at(alert.fired_step), shared.loss.end
        parts.append(rule(at, y_at, at, shared.loss.start, "moment"))
        parts.append(element("text", "▲", x=at, y=y_at + 4, class_="mark", text_anchor="middle"))
    if start is not None:
        at, y_at = x.at(start), shared.loss.end
        parts.append(element("text", "✕", x=at, y=y_at + 18, class_="mark", text_anchor="middle"))
    return element("g", *parts, class_=line.class_)


def swatch(line: Line) -> Markup:
    """The line as it is drawn, for the legend and the table of verdicts."""
    drawn = element("line", x1=0, y1=5, x2=30, y2=5, class_="mean", stroke_dasharray=line.dash)
    return element(
        "svg", element("g", drawn, class_=line.class_), viewBox="0 0 30 10", class_="line", aria_hidden="true"
    )
