"""Single heads: heat maps of all of them over the steps, and the worst ones with their history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.monitor.leads import SEEN_APART
from attnwatch.reports import charts, heat
from attnwatch.reports.charts import Scale, number
from attnwatch.reports.panels import median, sparkline, thresholds
from attnwatch.reports.summary import fired, main_alert, onset
from attnwatch.reports.words import UNIT_INTERVAL

if TYPE_CHECKING:
    from attnwatch.monitor.alerts import Alert
    from attnwatch.monitor.run import Run
    from attnwatch.monitor.sample import Metric

FRAMES = 100
WORST_ALERTS, WORST_METRICS = 3, 4


@dataclass(frozen=True)
class Colours:
    """Values at the quiet and at the loud end. Fixed, so that maps of different runs and pages compare."""

    quiet: float
    loud: float
    log: bool = False


MAPPED = {
    "entropy_ratio": Colours(0.8, 0.0),
    "qk_rank_ratio": Colours(1.0, 0.2),
    "spread_ratio": Colours(1.0, 30.0, log=True),
    "logit_max": Colours(10.0, 1e4, log=True),
    "first_key_mass": Colours(0.0, 1.0),
}
"""The loud end is the signature of collapse: low entropy, few directions, wide logits. Mass: loud is much."""


@dataclass(frozen=True)
class HeatMap:
    """One metric: its colours and the data URI of its frames."""

    metric: str
    colours: Colours
    sprite: str


@dataclass(frozen=True)
class HeatMaps:
    """steps: of the frames; shown: the frame to show first, at the main alert or the end. marked: worst heads as
    (layer, head) indices. table: a row a layer, the median over its heads of each metric at the frame shown."""

    steps: tuple[int, ...]
    shown: int
    layers: int
    heads: int
    maps: tuple[HeatMap, ...]
    marked: tuple[tuple[int, int], ...]
    table: tuple[tuple[str, tuple[str, ...]], ...]


def heat_maps(run: Run, pixels: int) -> HeatMaps | None:
    """The maps of one run in at most about `pixels` pixels in all; None when nothing was measured."""
    names = [metric.name for metric in run.metrics if metric.name in MAPPED]
    if not len(run.steps) or not names:
        return None
    layers, heads = len(run.layers), run.heads
    alert = main_alert(run)
    moments = [step for step in (alert.fired_step if alert else None, onset(run)) if step is not None]
    frames = frame_indices(run.steps, moments, max(2, min(FRAMES, pixels // (layers * heads * len(names)))))
    steps = run.steps[frames]
    shown = len(frames) - 1
    if alert is not None and alert.fired_step is not None:
        shown = max(int(np.searchsorted(steps, alert.fired_step, side="right")) - 1, 0)
    maps, columns = [], []
    for metric in sorted((m for m in run.metrics if m.name in MAPPED), key=lambda m: list(MAPPED).index(m.name)):
        values = run.metric(metric.name)
        if metric.merge == "last":
            values = held(values)
        values, colours = values[frames], MAPPED[metric.name]
        if not np.isfinite(values).any():
            continue
        picture = heat.sprite(values, colours.quiet, colours.loud, log=colours.log)
        maps.append(HeatMap(metric.name, colours, picture))
        columns.append([number(float(value)) for value in median(values[shown])])
    if not maps:
        return None
    places = {name: index for index, name in enumerate(run.layers)}
    worst = alert.heads if alert is not None else ()
    return HeatMaps(
        tuple(int(step) for step in steps),
        shown,
        layers,
        heads,
        tuple(maps),
        tuple((places[layer], head) for layer, head in worst if layer in places and head < heads),
        tuple((name, row) for name, row in zip(run.layers, zip(*columns, strict=True), strict=True)),
    )


def frame_indices(steps: NDArray[np.int64], moments: list[int], limit: int) -> NDArray[np.intp]:
    """At most `limit` samples, evenly spread, with the first, the last and those of the moments among them."""
    wanted = [int(np.clip(np.searchsorted(steps, moment, side="right") - 1, 0, len(steps) - 1)) for moment in moments]
    wanted = wanted[: max(limit - 2, 0)]
    even = np.linspace(0, len(steps) - 1, min(max(limit - len(wanted), 2), len(steps))).round().astype(np.intp)
    return np.unique(np.concatenate([even, np.array(wanted, dtype=np.intp)]))


def held(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[S, L, H]` with each head's last known value in place of later gaps."""
    known = np.where(np.isnan(values), -1, np.arange(len(values))[:, None, None])
    newest = np.maximum.accumulate(known, axis=0)
    return np.where(newest < 0, np.nan, np.take_along_axis(values, np.maximum(newest, 0), axis=0)).astype(np.float32)


@dataclass(frozen=True)
class WorstHead:
    """layer, head; cells: for each metric the value when the alert fired and the history as a picture."""

    layer: str
    head: int
    cells: tuple[tuple[str, Markup], ...]


@dataclass(frozen=True)
class WorstHeads:
    alert: Alert
    metrics: tuple[str, ...]
    heads: tuple[WorstHead, ...]


def worst_heads(run: Run) -> list[WorstHeads]:
    """The heads that the first alerts named, critical ones before warnings; one alert a rule."""
    found: dict[str, WorstHeads] = {}
    known = {metric.name: metric for metric in run.metrics}
    for alert in [*fired(run, "critical"), *fired(run, "warning")]:
        if alert.rule in found or alert.rule in SEEN_APART or not alert.heads or len(found) == WORST_ALERTS:
            continue
        names = tuple(name for name in alert.values if name in known)[:WORST_METRICS]
        named = [(layer, head) for layer, head in alert.heads if layer in run.layers and head < run.heads]
        if not named or not len(run.steps):
            continue
        columns = [_column(run, alert, known[name], named) for name in names]
        cells = zip(*columns, strict=True) if columns else [()] * len(named)
        heads = tuple(WorstHead(*head, tuple(row)) for head, row in zip(named, cells, strict=True))
        found[alert.rule] = WorstHeads(alert, names, heads)
    return list(found.values())


def _column(run: Run, alert: Alert, metric: Metric, named: list[tuple[str, int]]) -> list[tuple[str, Markup]]:
    """Of each head the value when the alert fired and the history, all on one scale."""
    values = run.metric(metric.name)
    values = held(values) if metric.merge == "last" else values
    histories = [values[:, run.layers.index(layer), head] for layer, head in named]
    line = next((each.value for each in thresholds(metric.name, run.rules) if each.rule == alert.rule), None)
    low, high = charts.limits(histories, [] if line is None else [line])
    y = Scale(0.0, 1.0, 28, 2) if metric.name in UNIT_INTERVAL else Scale(low, high, 28, 2)
    moment = alert.fired_step or 0
    index = max(int(np.searchsorted(run.steps, moment, side="right")) - 1, 0)
    titles = [f"{metric.name} of {layer}, head {head}" for layer, head in named]
    return [
        (number(float(history[index])), sparkline(title, run.steps, history, y, line, float(moment)))
        for title, history in zip(titles, histories, strict=True)
    ]
