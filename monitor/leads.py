"""How many steps before the loss diverged an alert stood: one definition for reports and replays.

The lead of a rule is the onset of divergence (the first step of the streak that made `loss_divergence` fire) minus
the step at which the rule's alert fired. Onset and firing are the unfavourable ends of both, so a lead is never
flattered by the waiting that the rules themselves do. An alert that had resolved before the onset predicts nothing
and has no lead. Zero or less: the alert came no earlier than the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attnwatch.monitor.alerts import Alert

DIVERGENCE = "loss_divergence"
SEEN_APART = (DIVERGENCE, "uncovered_layers")
"""Rules that are no news of the attention: divergence and coverage are told in words of their own."""
GRAVE = ("warning", "critical")


def fired(alerts: Iterable[Alert], *severities: str) -> list[Alert]:
    """Those that fired, first one first; only of these severities when some are given."""
    found = [a for a in alerts if a.fired_step is not None and (not severities or a.severity in severities)]
    return sorted(found, key=lambda alert: (alert.fired_step or 0, alert.pending_step))


def warnings(alerts: Iterable[Alert]) -> list[Alert]:
    """Those about attention, of severity warning or critical, that fired, first one first."""
    return [alert for alert in fired(alerts, *GRAVE) if alert.rule not in SEEN_APART]


def onset(alerts: Iterable[Alert]) -> int | None:
    """First step of the streak that made `loss_divergence` fire; None when it never did."""
    return min((alert.pending_step for alert in fired(alerts) if alert.rule == DIVERGENCE), default=None)


def leads(alerts: Iterable[Alert], start: int | None, rules: Collection[str] | None = None) -> dict[str, int]:
    """Steps from each rule's first alert that still stood at the onset `start` to that onset; none without an onset.

    Of warnings and critical alerts about attention, only of `rules` when they are given.
    """
    if start is None:
        return {}
    found: dict[str, int] = {}
    for alert in warnings(alerts):
        stands = alert.resolved_step is None or alert.resolved_step >= start
        if stands and (rules is None or alert.rule in rules):
            found.setdefault(alert.rule, start - (alert.fired_step or 0))
    return found
