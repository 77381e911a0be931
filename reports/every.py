"""Every metric of every run: its chart by layer and its heat map, each read from the disk once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from attnwatch.monitor.sample import UsageError
from attnwatch.reports import facts, heads
from attnwatch.reports.heads import HeatMaps
from attnwatch.reports.known import forgotten, held
from attnwatch.reports.panels import Bounds, Detail, Reduced, healthy_band, panel, reduce, thresholds, value_scale
from attnwatch.reports.words import GROUPS, READING

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run
    from attnwatch.monitor.sample import Metric

LINE_POINTS = 300_000
"""Points of all lines of a page: about 1.7 MB."""
HEAT_PIXELS = 1_300_000
"""Pixels of all heat maps of a page: at most 1.4 MB, as base64 of what hardly compresses."""


Maps = tuple[HeatMaps | None, HeatMaps | None]
"""Of one run the maps of the signature of collapse, and those of all other metrics."""


class Sheet(NamedTuple):
    """groups: of charts, for the template. maps: of each run."""

    groups: list[dict[str, Any]]
    maps: list[Maps]


class Found(NamedTuple):
    """What one run has of one metric. frames `[F, L, H]`."""

    reduced: Reduced
    frames: heads.Frames


def detail_of(runs: Sequence[Run]) -> Detail:
    """Points a line and lines a chart that keep the page within its size."""
    layers = min(64, max(8, LINE_POINTS // (40 * sum(max(len(run.metrics), 1) for run in runs))))
    lines = sum(len(run.metrics) * (min(len(run.layers), layers) + 2) for run in runs)
    return Detail(min(500, max(40, LINE_POINTS // max(lines, 1))), layers, max(24, min(96, 240 // len(runs))))


def every_metric(runs: Sequence[Run], span: tuple[float, float], detail: Detail) -> Sheet:
    known = {metric.name: metric for run in runs for metric in run.metrics}
    named = {name for group in GROUPS for name in group.metrics}
    others = [name for name in known if name not in named]
    plans = [(group.title, group.text, [name for name in group.metrics if name in known]) for group in GROUPS]
    plans = [plan for plan in [*plans, ("Other metrics", "", others)] if plan[2]]
    order = [name for _, _, names in plans for name in names]
    signature = [name for name in heads.SIGNATURE if name in known]
    rest = [name for name in order if name not in heads.SIGNATURE]
    at = [{**_frames(run, signature, len(runs)), **_frames(run, rest, len(runs))} for run in runs]
    found = [_read(run, detail, each) for run, each in zip(runs, at, strict=True)]
    charts = {name: _chart(runs, known[name], [each.get(name) for each in found], span) for name in order}
    groups = []
    for title, text, names in plans:
        shown = [charts[name] for name in names]
        drawn, silent = [c for c in shown if c["measured"]], [c["metric"].name for c in shown if not c["measured"]]
        groups.append({"title": title, "text": text, "charts": drawn, "silent": silent})
    scales = {name: heads.colours_of(name, [each[name].frames for each in found if name in each]) for name in order}
    maps = [
        (_maps(run, signature, frames, each, scales), _maps(run, rest, frames, each, scales))
        for run, frames, each in zip(runs, at, found, strict=True)
    ]
    return Sheet(groups, maps)


def _frames(run: Run, names: Sequence[str], runs: int) -> dict[str, Any]:
    """Which samples become frames of these metrics, half the page's pixels for all of them."""
    indices = heads.frames(run, max(len(names), 1), HEAT_PIXELS // 2 // runs)
    return dict.fromkeys(names, indices)


def _read(run: Run, detail: Detail, at: Mapping[str, Any]) -> dict[str, Found]:
    gone, found = forgotten(run), {}
    for metric in run.metrics:
        values = run.metric(metric.name)
        reduced = reduce(run.steps, values, metric, detail, _bounds(run, metric.name))
        rows = at[metric.name]
        found[metric.name] = Found(reduced, held(values, gone, rows) if metric.merge == "last" else values[rows])
    return found


def _bounds(run: Run, name: str) -> Bounds | None:
    """What a thinned run knows of the samples that were left out; None where they lie no more beside it."""
    if run.is_thinned:
        with suppress(UsageError):
            return run.envelope(name)
    return None


def _maps(
    run: Run, names: Sequence[str], at: Mapping[str, Any], found: Mapping[str, Found],
    scales: Mapping[str, heads.Colours],
) -> HeatMaps | None:  # fmt: skip
    here = {name: found[name].frames for name in names if name in found}
    return heads.heat_maps(run, at[names[0]], here, scales) if here else None


def _chart(
    runs: Sequence[Run], metric: Metric, found: Sequence[Found | None], span: tuple[float, float]
) -> dict[str, Any]:
    nothing = reduce(np.zeros(0, np.int64), np.zeros((0, 0, 0), np.float32), metric, Detail(2, 1))
    parts = [nothing if each is None else each.reduced for each in found]
    rules = [facts.rules(run) for run in runs]
    lines = thresholds(metric.name, [rule for each in rules for rule in each])
    measured = any(part.rows for part in parts)
    y = value_scale(metric.name, parts, lines) if measured else None
    bands = [healthy_band(metric.name, each) for each in rules]
    return {
        "metric": metric,
        "reading": READING.get(metric.name, metric.help),
        "measured": measured,
        "log": y is not None and y.log,
        "lines": [line for line in lines if y is not None and y.holds(line.value)],
        "panels": [
            (
                name,
                Markup("") if y is None else panel(run, metric.name, part, span, y, lines, band),
                part.table,
            )
            for run, name, part, band in zip(runs, facts.names(runs), parts, bands, strict=True)
        ],
    }
