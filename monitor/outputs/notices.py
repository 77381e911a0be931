"""Alerts as others want to read them: what an Alertmanager posts to its receivers, and lines for a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from attnwatch.monitor.alerts import SEVERITIES, Alert
from attnwatch.monitor.outputs.log import alert_line, one_line
from attnwatch.monitor.sample import Update

STANDING = "0001-01-01T00:00:00Z"
"""`endsAt` of an alert that has not ended, as Alertmanager writes it."""

_SLACK, _DISCORD = 4000, 2000
"""Characters that fit in a message."""


def news(update: Update, min_severity: str = "info") -> list[Alert]:
    """What fired or resolved with this update. Not what is pending, nor what passed before it fired."""
    least = SEVERITIES.index(min_severity)
    return [
        alert
        for alert in update.changed
        if alert.state != "pending" and alert.fired_step is not None and SEVERITIES.index(alert.severity) >= least
    ]


def identity(alert: Alert) -> tuple[str, str, int]:
    """The same while one alert lives."""
    return alert.rule, alert.place, alert.pending_step


def step_of(alert: Alert) -> int | None:
    """The step of the change that an alert of `news` tells of."""
    return alert.fired_step if alert.resolved_step is None else alert.resolved_step


def alertmanager(alerts: Sequence[Alert], run: str, began: Mapping[tuple[str, str, int], float], now: float) -> Any:
    """The body, of version 4, that an Alertmanager posts to a webhook.

    run: its name, by which alerts are grouped. began: unix seconds of each alert by its `identity`.
    """
    told = [_told(alert, run, began.get(identity(alert), now), now) for alert in alerts]
    return {
        "receiver": "attnwatch",
        "status": "firing" if any(alert["status"] == "firing" for alert in told) else "resolved",
        "alerts": told,
        "groupLabels": {"run": run},
        "commonLabels": _common([alert["labels"] for alert in told]),
        "commonAnnotations": _common([alert["annotations"] for alert in told]),
        "externalURL": "",
        "version": "4",
        "groupKey": f"{{}}:{{run={json.dumps(run, ensure_ascii=False)}}}",
        "truncatedAlerts": 0,
    }


def slack(alerts: Sequence[Alert], run: str) -> Any:
    """What Slack's incoming webhooks take; `&`, `<` and `>` would mean mentions and links."""
    text = _lines(alerts, run).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": _cut(text, _SLACK)}


def discord(alerts: Sequence[Alert], run: str) -> Any:
    """What Discord's webhooks take; nobody is mentioned, whatever a layer is called."""
    return {"content": _cut(_lines(alerts, run), _DISCORD), "allowed_mentions": {"parse": []}}


def fingerprint(labels: Mapping[str, str]) -> str:
    """Alertmanager's: 64-bit FNV-1a of names and values, sorted by name, with a byte 255 after each."""
    code = 0xCBF29CE484222325
    for byte in b"".join(_bytes(text) + b"\xff" for pair in sorted(labels.items()) for text in pair):
        code = (code ^ byte) * 0x100000001B3 % 2**64
    return f"{code:016x}"


def _told(alert: Alert, run: str, began: float, now: float) -> dict[str, Any]:
    labels = {"alertname": alert.rule, "place": alert.place, "run": run, "severity": alert.severity}
    annotations = {
        "summary": alert.summary or alert_line(alert),
        "description": alert_line(alert),
        "step": str(step_of(alert)),
    }
    return {
        "status": alert.state,
        "labels": labels,
        "annotations": annotations,
        "startsAt": _time(began),
        "endsAt": STANDING if alert.resolved_step is None else _time(now),
        "generatorURL": "",
        "fingerprint": fingerprint(labels),
    }


def _common(sets: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for name, value in sets[0].items() if all(other.get(name) == value for other in sets)}


def _lines(alerts: Sequence[Alert], run: str) -> str:
    return "\n".join(one_line(f"[{run}] {alert_line(alert)}") for alert in alerts)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
