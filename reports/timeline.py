"""The loss over the steps, with every alert below it: when it was pending, when it fired, when it resolved."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.reports import charts
from attnwatch.reports.charts import Floats, Scale, element, fine, label, number, rule
from attnwatch.reports.summary import COLLAPSE, lead, leads, onset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnwatch.monitor.alerts import Alert
    from attnwatch.monitor.run import Run

WIDTH, GUTTER, RIGHT = 1040, 172, 18
TOP, HEIGHT, LANE, AXIS = 44, 200, 25, 30
LANES = 12
SMOOTH = 20
"""Steps of the running mean that is drawn over the loss: the one that `loss_divergence` compares."""
POINTS = 500

RANK = {"critical": 0, "warning": 1, "info": 2}


def loss_scale(runs: Sequence[Run]) -> Scale:
    """The loss axis that all runs of a page share: logarithmic when the losses span more than a factor of 30."""
    losses = [run.scalar("loss")[1] for run in runs if "loss" in run.scalar_names]
    known = np.concatenate([np.zeros(0), *losses])
    known = known[np.isfinite(known)]
    log = bool(known.size) and known.min() > 0 and known.max() > 30 * known.min()
    low, high = (float(known.min()) / 1.1, float(known.max()) * 1.1) if log else charts.limits(known)
    return Scale(low, high, TOP + HEIGHT, TOP, log)


def timeline(run: Run, span: tuple[float, float], y: Scale) -> Markup:
    """Loss, alerts, divergence and lead of one run; `span` is the range of steps that all runs of a page share."""
    lanes = alert_lanes(run.alerts)
    bottom = TOP + HEIGHT
    height = bottom + 14 + LANE * len(lanes) + AXIS
    x = Scale(*span, GUTTER, WIDTH - RIGHT)
    start, steps = onset(run), lead(run)
    described = f"Loss over {number(span[0])} to {number(span[1])} steps and {len(lanes)} rules that alerted"
    if start is not None:
        described += f"; the loss diverges from step {start:,}"
    if steps is not None:
        described += f", {abs(steps):,} steps {'after' if steps > 0 else 'before'} the alert on attention"
    return charts.svg(
        WIDTH, height, f"Time line of {run.path.name}", described + ".",
        _grid(x, bottom, height - AXIS),
        _divergence(run, x, bottom + 14 + LANE * len(lanes)),
        _loss(run, x, y),
        *(_lane(bottom + 14 + LANE * i, group, x) for i, group in enumerate(lanes)),
        class_="timeline",
    )  # fmt: skip


def alert_lanes(alerts: tuple[Alert, ...]) -> list[list[Alert]]:
    """Alerts that fired or may yet, by rule; the rules in order of their first alert, the LANES gravest."""
    real = [alert for alert in alerts if alert.fired_step is not None or alert.state == "pending"]
    by_rule = sorted(real, key=lambda alert: (alert.rule, alert.pending_step))
    lanes = [list(group) for _, group in groupby(by_rule, key=lambda alert: alert.rule)]
    kept = sorted(lanes, key=lambda lane: RANK.get(lane[0].severity, 3))[:LANES]
    return sorted(kept, key=lambda lane: (lane[0].pending_step, RANK.get(lane[0].severity, 3)))


def running_mean(values: Floats, width: int = SMOOTH) -> Floats:
    """Mean of the last `width` values, of all there are before that; NaN while one of them is not finite."""
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    holes = np.concatenate([[0], np.cumsum(~known)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - width, 0)
    mean: Floats = (total[ends] - total[begins]) / (ends - begins)
    return np.where(holes[ends] > holes[begins], np.nan, mean)


def _grid(x: Scale, bottom: float, end: float) -> Markup:
    ticks = x.ticks(8)
    return element(
        "g",
        *(rule(x.at(tick), TOP, x.at(tick), end, "grid") for tick in ticks),
        *(label(x.at(tick), end + 17, number(tick)) for tick in ticks),
        rule(GUTTER, bottom, WIDTH - RIGHT, bottom, "base"),
        label(GUTTER - 12, end + 17, "step", "tick", "end"),
    )


def _loss(run: Run, x: Scale, y: Scale) -> Markup:
    if "loss" not in run.scalar_names:
        return label((GUTTER + WIDTH) / 2, TOP + HEIGHT / 2, "The trainer passed no loss", "empty")
    steps, loss = run.scalar("loss")
    ticks = y.ticks(4)
    broken = steps[~np.isfinite(loss)]
    return element(
        "g",
        *(rule(GUTTER, y.at(tick), WIDTH - RIGHT, y.at(tick), "grid") for tick in ticks),
        *(label(GUTTER - 12, y.at(tick) + 4, number(tick), "tick", "end") for tick in ticks),
        label(0, TOP + 4, "loss" + (" (log)" if y.log else ""), "lane-name", "start"),
        fine(*_curve(x, y, steps, loss)),
        *(
            [
                rule(x.at(broken[0]), TOP, x.at(broken[0]), TOP + HEIGHT, "broken"),
                label(x.at(broken[0]) - 6, TOP + 32, f"not finite from step {broken[0]:,}", "note", "end"),
            ]
            if len(broken)
            else []
        ),
    )


def _curve(x: Scale, y: Scale, steps: NDArray[np.int64], loss: Floats) -> list[Markup]:
    """The loss and its running mean; of a long run the range in each of POINTS groups, and a mean as wide as two."""
    loss = np.where(np.isfinite(loss), loss, np.nan)
    mean = running_mean(loss, max(SMOOTH, 2 * len(loss) // POINTS))
    if len(loss) <= 2 * POINTS:
        raw = element("path", d=charts.path(x(steps), y(loss)), class_="raw")
        return [raw, element("path", d=charts.path(x(steps), y(mean)), class_="loss")]
    starts = charts.bins(len(loss), POINTS)
    low, high = np.fmin.reduceat(loss, starts), np.fmax.reduceat(loss, starts)
    last = np.append(starts[1:], len(loss)) - 1
    return [
        element("path", d=charts.area(x(steps[last]), y(low), y(high)), class_="envelope"),
        element("path", d=charts.path(x(steps[last]), y(mean[last])), class_="loss"),
    ]


def _lane(top: float, alerts: list[Alert], x: Scale) -> Markup:
    middle = top + LANE / 2
    places = len({alert.place for alert in alerts})
    first = alerts[0]
    name = f"{first.rule} \N{MULTIPLICATION SIGN}{places}" if places > 1 else first.rule
    glyph = {"critical": "▲", "warning": "◆"}.get(first.severity, "●")
    bars, end = [], -1.0
    for alert, following in zip(alerts, [*alerts[1:], None], strict=True):
        room = x.end if following is None else x.at(following.fired_step or following.pending_step)
        bars.append(_bar(alert, middle, x, room, joins=alert.pending_step <= end))
        if alert.fired_step is not None:
            end = max(end, x.high if alert.resolved_step is None else alert.resolved_step)
    return element(
        "g",
        rule(GUTTER, middle, WIDTH - RIGHT, middle, "grid"),
        element("text", glyph, x=0, y=middle + 4, class_=f"glyph {first.severity}"),
        label(15, middle + 4, name, "lane-name", "start"),
        *bars,
    )


def _bar(alert: Alert, middle: float, x: Scale, room: float, joins: bool) -> Markup:
    """Hollow circle and thin line while pending, a bar while firing, an end mark where it resolved.

    joins: another place of the rule fires already: a notch in its bar shows where this one sets in. room: the x up to
    which a label may run.
    """
    end = x.at(x.high if alert.resolved_step is None else alert.resolved_step)
    pending, start = x.at(alert.pending_step), end if alert.fired_step is None else x.at(alert.fired_step)
    when = "never fired" if alert.fired_step is None else f"fired at step {alert.fired_step:,}"
    until = "" if alert.resolved_step is None else f", resolved at {alert.resolved_step:,}"
    parts = [element("title", f"{alert.rule}, {alert.place}: pending from step {alert.pending_step:,}, {when}{until}")]
    if not joins:
        parts.append(rule(pending, middle, start, middle, "pending"))
        parts.append(element("circle", cx=pending, cy=middle, r=3, class_="pending"))
    if alert.fired_step is not None:
        width = max(end - start, 3.0)
        parts.append(element("rect", x=start, y=middle - 5, width=width, height=10, rx=2, class_="firing"))
        if joins:
            parts.append(rule(start, middle - 5, start, middle + 5, "notch"))
        elif min(end, room) - start > 62:
            parts.append(label(start + 7, middle + 3.6, f"step {alert.fired_step:,}", "on-bar", "start"))
    if alert.resolved_step is not None:
        parts.append(rule(end, middle - 8, end, middle + 8, "resolved"))
    return element("g", *parts, class_=f"alert {alert.severity}")


def _divergence(run: Run, x: Scale, bottom: float) -> Markup:
    """The line where the loss begins to diverge, and the lead of the earliest alert before it."""
    start, ahead = onset(run), lead(run)
    if start is None:
        return Markup("")
    at = x.at(start)
    room = at < WIDTH - RIGHT - 132
    parts = [
        rule(at, TOP - 6, at, bottom, "onset"),
        label(at + (7 if room else -7), TOP + 13, f"loss diverges from {start:,}", "note", "start" if room else "end"),
    ]
    if ahead is not None and ahead > 0:
        rule_name = max(leads(run), key=lambda name: (leads(run)[name], -COLLAPSE.index(name)))
        fired, y = x.at(start - ahead), TOP - 16
        parts += [
            element("rect", x=fired, y=TOP - 6, width=at - fired, height=HEIGHT + 6, class_="ahead"),
            rule(fired, TOP - 6, fired, bottom, "fired"),
            element("path", d=f"M{fired:.1f} {y + 6}V{y}H{at:.1f}V{y + 6}", class_="bracket"),
            label((fired + at) / 2, y - 8, f"{ahead:,} {'step' if ahead == 1 else 'steps'} of warning", "lead"),
            element("title", f"{rule_name} fired {ahead:,} steps before the loss began to diverge"),
        ]
    return element("g", *parts)
