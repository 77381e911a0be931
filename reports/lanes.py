"""Alerts below the time line, a lane a rule: pending, firing, resolved."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from markupsafe import Markup

from attnwatch.reports.charts import Scale, element, label, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnwatch.monitor.alerts import Alert

LANE = 25
LANES = 12
RANK = {"critical": 0, "warning": 1, "info": 2}
GLYPHS = {"critical": "▲", "warning": "◆"}


def alert_lanes(alerts: Sequence[Alert]) -> list[list[Alert]]:
    """Alerts that fired or may yet, by rule; the rules in order of their first alert, the LANES gravest."""
    real = [alert for alert in alerts if alert.fired_step is not None or alert.state == "pending"]
    by_rule = sorted(real, key=lambda alert: (alert.rule, alert.pending_step))
    lanes = [list(group) for _, group in groupby(by_rule, key=lambda alert: alert.rule)]
    kept = sorted(lanes, key=lambda lane: RANK.get(lane[0].severity, 3))[:LANES]
    return sorted(kept, key=lambda lane: (lane[0].pending_step, RANK.get(lane[0].severity, 3)))


def name(top: float, alerts: Sequence[Alert]) -> Markup:
    """What stands at the left of a lane."""
    middle = top + LANE / 2
    places, first = len({alert.place for alert in alerts}), alerts[0]
    said = f"{first.rule} \N{MULTIPLICATION SIGN}{places}" if places > 1 else first.rule
    glyph = GLYPHS.get(first.severity, "●")
    return element(
        "g",
        element("text", glyph, x=0, y=middle + 4, class_=f"glyph {first.severity}"),
        label(15, middle + 4, said, "lane-name", "start"),
    )


def bars(top: float, alerts: Sequence[Alert], x: Scale) -> Markup:
    """The alerts of one rule along the steps."""
    middle = top + LANE / 2
    drawn, end = [], -1.0
    for alert, following in zip(alerts, [*alerts[1:], None], strict=True):
        room = x.end if following is None else x.at(following.fired_step or following.pending_step)
        drawn.append(_bar(alert, middle, x, room, joins=alert.pending_step <= end))
        if alert.fired_step is not None:
            end = max(end, x.high if alert.resolved_step is None else alert.resolved_step)
    return element("g", *drawn)


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
