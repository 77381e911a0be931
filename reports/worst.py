"""The heads that an alert named first, with their history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.monitor.leads import SEEN_APART
from attnwatch.reports import charts, facts
from attnwatch.reports.charts import Scale, copyable, number
from attnwatch.reports.known import forgotten, held, is_held
from attnwatch.reports.panels import comparisons, sparkline
from attnwatch.reports.summary import fired, onset
from attnwatch.reports.words import UNIT_INTERVAL

if TYPE_CHECKING:
    from attnwatch.monitor.alerts import Alert
    from attnwatch.monitor.run import Run

WORST_ALERTS, WORST_METRICS = 3, 4


@dataclass(frozen=True)
class WorstHead:
    """layer, head; cells: for each metric the value when the alert fired and the history as a picture; values: for each
    metric the numbers at the moments of the table."""

    layer: str
    head: int
    cells: tuple[tuple[str, Markup], ...]
    values: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class WorstHeads:
    """moments: names and steps of the table's columns."""

    alert: Alert
    metrics: tuple[str, ...]
    moments: tuple[tuple[str, int], ...]
    heads: tuple[WorstHead, ...]


def moments(run: Run, alert: Alert | None) -> list[tuple[str, int]]:
    """The samples at which a run is looked at closely: (what, step of the sample)."""
    if not len(run.steps):
        return []
    found = [("start", int(run.steps[0]))]
    for what, step in (("alert", alert.fired_step if alert else None), ("divergence", onset(run))):
        if step is not None:
            found.append((what, int(run.steps[_before(run, step)])))
    return [*found, ("end", int(run.steps[-1]))]


def _before(run: Run, step: int) -> int:
    """Index of the newest sample at that step."""
    return max(int(np.searchsorted(run.steps, step, side="right")) - 1, 0)


def worst_heads(run: Run) -> list[WorstHeads]:
    """The heads that the first alerts named, critical ones before warnings; one alert a rule."""
    found: dict[str, WorstHeads] = {}
    known = {metric.name for metric in run.metrics}
    gone = forgotten(run)
    for alert in [*fired(run, "critical"), *fired(run, "warning")]:
        if alert.rule in found or alert.rule in SEEN_APART or len(found) == WORST_ALERTS:
            continue
        named = [(layer, head) for layer, head in alert.heads if layer in run.layers and 0 <= head < run.heads]
        if not named or not len(run.steps):
            continue
        names = tuple(name for name in alert.values if name in known)[:WORST_METRICS]
        at = moments(run, alert)
        rows = [_before(run, step) for _, step in at]
        known_of = {name: each for name in names if _is_known(each := _histories(run, name, named, gone))}
        histories = list(known_of.values())
        columns = [_pictures(run, alert, name, named, each) for name, each in known_of.items()]
        heads = tuple(
            WorstHead(
                layer, head, tuple(column[index] for column in columns),
                tuple(tuple(copyable(float(each[index][row])) for row in rows) for each in histories),
            )
            for index, (layer, head) in enumerate(named)
        )  # fmt: skip
        found[alert.rule] = WorstHeads(alert, tuple(known_of), tuple(at), heads)
    return list(found.values())


def _histories(
    run: Run, name: str, named: list[tuple[str, int]], gone: NDArray[np.bool_] | None
) -> list[NDArray[np.float32]]:
    """`[S]` of each head."""
    layers, heads = [run.layers.index(layer) for layer, _ in named], [head for _, head in named]
    values = run.metric(name)[:, layers, heads][:, :, None]
    if is_held(run, name):
        values = held(values, None if gone is None else gone[:, layers])
    return [values[:, index, 0] for index in range(len(named))]


def _is_known(histories: list[NDArray[np.float32]]) -> bool:
    """A rule may ask for what these heads have not, as the bound of a norm."""
    return not all(np.isnan(history).all() for history in histories)


def _pictures(
    run: Run, alert: Alert, name: str, named: list[tuple[str, int]], histories: list[NDArray[np.float32]]
) -> list[tuple[str, Markup]]:
    """Of each head the value when the alert fired and the history, all on one scale."""
    compared = [line.value for _, line in comparisons(name, facts.rules(run)) if line.rule == alert.rule]
    line = compared[0] if compared else None
    shown = [*histories, np.array([] if line is None else [line])]
    decades = charts.log_limits(*shown, spread=50)
    y = Scale(*(decades or charts.limits(*shown)), 28, 2, log=decades is not None)
    if name in UNIT_INTERVAL:
        y = Scale(0.0, 1.0, 28, 2)
    moment = alert.fired_step or 0
    row = _before(run, moment)
    return [
        (
            number(float(history[row])),
            sparkline(f"{name} of {facts.text(layer)}, head {head}", run.steps, history, y, line, float(moment)),
        )
        for (layer, head), history in zip(named, histories, strict=True)
    ]
