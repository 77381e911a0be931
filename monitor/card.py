"""What a notebook shows of a monitor or a run: one small piece of HTML, with no script and no style sheet."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import isfinite
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.outputs.layers import over_heads
from attnwatch.monitor.outputs.log import coverage_line, one_line
from attnwatch.monitor.sample import Coverage, Problem, Sample

METRICS = ("entropy_ratio", "spread_ratio", "logit_max", "map_rank", "qk_rank_ratio")
COLOURS = {"info": "#3d6f9e", "warning": "#c98500", "critical": "#d0433c"}
_MOST = 8
"""Alerts, and problems, that are listed."""
_LAYERS = 200
"""That have a row."""


class Cell(NamedTuple):
    least: str
    mean: str
    largest: str
    shade: str


def card(
    title: str,
    now: str,
    coverage: tuple[Coverage, ...],
    alerts: Iterable[Alert],
    sample: Sample | None,
    problems: Iterable[Problem],
) -> str:
    """HTML, everything escaped. now: one line, such as the step and what comes next. sample: the newest one, if any."""
    firing = [alert for alert in alerts if alert.state == "firing"]
    columns, rows = _table(sample)
    return _template().render(
        title=one_line(title),
        now=one_line(now),
        covered=one_line(coverage_line(coverage) if coverage else "no sample yet"),
        alerts=_some([(COLOURS[alert.severity], one_line(_said(alert))) for alert in firing], "transparent")
        or [("transparent", "no alert is firing")],
        problems=[text for _, text in _some([("", one_line(f"{p.where}: {p.text}")) for p in problems], "")],
        step=None if sample is None else sample.step,
        columns=columns,
        rows=rows,
        more=0 if sample is None else max(len(sample.layers) - _LAYERS, 0),
    )


def _said(alert: Alert) -> str:
    return f"{alert.severity}: {alert.rule} at {alert.place} since step {alert.fired_step}. {alert.summary}".strip()


def _some(lines: list[tuple[str, str]], colour: str) -> list[tuple[str, str]]:
    more = len(lines) - _MOST
    return lines if more <= 0 else [*lines[:_MOST], (colour, f"and {more} more")]


def _table(sample: Sample | None) -> tuple[list[str], list[tuple[str, list[Cell]]]]:
    """Columns of what was measured, and the cells of each layer, shaded by their share of the column's largest mean."""
    if sample is None:
        return [], []
    found = {name: over_heads(sample[name]) for name in METRICS if name in sample.metrics}
    found = {name: values for name, values in found.items() if not np.isnan(values).all()}
    cells = [_column(values[:, :_LAYERS]) for values in found.values()]
    layers = [one_line(layer) for layer in sample.layers[:_LAYERS]]
    return list(found), [(layer, [column[i] for column in cells]) for i, layer in enumerate(layers)]


def _column(values: NDArray[np.float64]) -> list[Cell]:
    """`[3, L]`: least, mean and largest."""
    highest = max((mean for mean in values[1] if isfinite(mean)), default=0.0)

    def cell(least: float, mean: float, largest: float) -> Cell:
        shade = 0.45 * mean / highest if isfinite(mean) and 0 < mean <= highest else 0.0
        return Cell(_number(least), _number(mean), _number(largest), f"{shade:.2f}")

    return [cell(*column) for column in values.T.tolist()]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


@cache
def _template() -> Template:
    loader = PackageLoader("attnwatch.monitor", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("card.html")
