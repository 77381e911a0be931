"""One plain line through `logging` when something happens; never a live screen inside the trainer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.sample import Coverage, Problem, Update

LOG = logging.getLogger("attnwatch")

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}
"""Level of each severity. An alert resolves at the level it fired at: who saw the one sees the other."""

_NAMED = 8
"""Layers named in one line; the run directory has them all."""


class LogOutput:
    """Logs to "attnwatch": alerts that fire or resolve, problems, another interval, and once how much is covered."""

    def __init__(self) -> None:
        self._covered = False
        self._problems: set[Problem] = set()
        self._interval = 0

    def write(self, update: Update) -> None:
        if update.coverage and update.samples and not self._covered:
            self._covered = True
            verified = all(layer.state == "verified" for layer in update.coverage) and update.coverage
            _log(logging.INFO if verified else logging.WARNING, coverage_line(update.coverage))
        if self._interval not in (0, update.interval):
            now = f"sampling every {update.interval} steps now, at {update.share:.1%} of the time"
            _log(logging.INFO, now)
        self._interval = update.interval
        for problem in update.problems:
            if problem not in self._problems:
                self._problems.add(problem)
                _log(logging.WARNING, f"{problem.where}: {problem.text} (step {problem.step})")
        for alert in update.changed:
            if alert.state != "pending" and alert.fired_step is not None:
                _log(LEVELS[alert.severity], alert_line(alert))

    def close(self) -> None:
        """Nothing is held."""


def alert_line(alert: Alert) -> str:
    """What fired or resolved, where and when; on firing also the evidence, the summary and the advice."""
    what = f"{alert.severity}: {alert.rule} at {alert.place}"
    if alert.state == "resolved":
        return f"{what} resolved at step {alert.resolved_step} (fired at step {alert.fired_step})"
    evidence = [f"{metric} {value:.4g}" for metric, value in alert.values.items()]
    heads = [f"{layer}/{head}" for layer, head in alert.heads]
    if heads and heads != [alert.place]:
        evidence.append(f"{alert.share:.0%} of heads, worst {' '.join(heads)}")
    found = f" ({', '.join(evidence)})" if evidence else ""
    texts = [f"{what} firing at step {alert.fired_step}{found}", alert.summary, alert.advice]
    return ". ".join(text.strip().rstrip(".") for text in texts if text)


def coverage_line(coverage: tuple[Coverage, ...]) -> str:
    """How many layers are verified; the others by state and name."""
    states = Counter(layer.state for layer in coverage)
    parts = [f"{states['verified']} of {len(coverage)} attention layers verified"]
    for state in ("logits_only", "uncovered"):
        names = [layer.name for layer in coverage if layer.state == state]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            parts.append(f"{len(names)} {state} ({', '.join(names[:_NAMED])}{more})")
    return ", ".join(parts)


def firing_lines(alerts: Iterable[Alert]) -> list[str]:
    """A line for each alert that fires now; "none firing" stands for none."""
    lines = [f"{a.severity} {a.rule} at {a.place} since step {a.fired_step}" for a in alerts if a.state == "firing"]
    return lines or ["none firing"]


def status(now: str, coverage: tuple[Coverage, ...], alerts: Iterable[Alert], problems: Iterable[Problem]) -> str:
    """What `print(monitor)` shows. now: the step, and what comes next."""
    covered = coverage_line(coverage) if coverage else "no sample yet"
    lines = [f"attnwatch: {covered}", f"  {now}"]
    lines += [f"  alert: {line}" for line in firing_lines(alerts)]
    lines += [f"  problem: {problem.where}: {problem.text}" for problem in problems]
    return "\n".join(map(one_line, lines))


def _log(level: int, text: str) -> None:
    LOG.log(level, "attnwatch: %s", one_line(text))


def one_line(text: str) -> str:
    """Line breaks, terminal escapes and other unprintable characters of a hostile name, written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
