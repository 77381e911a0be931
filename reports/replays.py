"""What `attnwatch replay` says: rich tables on a terminal, plain columns elsewhere, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnwatch.monitor.leads import DIVERGENCE, fired, warnings
from attnwatch.monitor.predictors import Crossing
from attnwatch.monitor.replay import Change, Outcome, Replay, Score, score
from attnwatch.monitor.run import Run
from attnwatch.monitor.sweep import Point
from attnwatch.reports.facts import counted, text
from attnwatch.reports.order import ONE_RUN, order
from attnwatch.reports.summary import plain

MOST_CHANGES = 40


class Finding(NamedTuple):
    """One run replayed. changes: against what it recorded; None when its own rules were replayed."""

    run: Run
    replay: Replay
    changes: list[Change] | None
    crossings: list[Crossing]


def as_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """All of it as JSON-able data; non-finite numbers are None."""
    return {
        "runs": [
            {
                "run": finding.run.path.name,
                "samples": len(finding.run.steps),
                "exception": finding.run.exception or None,
                "divergence_step": finding.replay.divergence,
                "lead": finding.replay.lead,
                "leads": finding.replay.leads,
                "alerts": [plain(asdict(alert)) for alert in fired(finding.replay.alerts)],
                "changes": None if finding.changes is None else [change._asdict() for change in finding.changes],
                "crossings": [crossing._asdict() for crossing in finding.crossings],
            }
            for finding in findings
        ],
        "score": _score(findings)._asdict(),
    }


def sweep_as_data(points: Sequence[Point]) -> dict[str, Any]:
    return {"sweep": [{"rule": point.rule, "value": point.value, **point.score._asdict()} for point in points]}


def show(findings: Sequence[Finding], console: Console) -> None:
    """Of every run what fired and which number moved first; of several also a table of all and a sentence."""
    for finding in findings:
        _show_run(finding, console)
    console.print(ONE_RUN)
    if len(findings) > 1:
        _show_all(findings, console)


def show_sweep(points: Sequence[Point], metric: str, console: Console) -> None:
    table = _table(console, "rule", f">{metric}", ">detected", ">others with a warning", ">median lead", ">least lead")
    for before, point in zip([None, *points], points, strict=False):
        if before is not None and before.rule != point.rule:
            table.add_section()
        of = point.score
        counts = (f"{of.detected} of {of.diverged}", f"{of.alarmed} of {of.others}")
        table.add_row(_text(point.rule), f"{point.value:.4g}", *counts, _number(of.median), _number(of.least))
    console.print(table)
    console.print(
        "detected: of the runs whose loss diverged, a warning fired before and still stood. others with a warning: of "
        "the runs whose loss did not diverge; a collapse whose loss only gets worse is among them.",
        markup=False,
    )


def _show_run(finding: Finding, console: Console) -> None:
    run, replayed = finding.run, finding.replay
    end = "the loss did not diverge" if "loss" in run.scalar_names else "no loss was recorded"
    if replayed.divergence is not None:
        end = f"the loss diverged at step {replayed.divergence:,}"
    broken = f"; ended by an exception: {text(run.exception)}" if run.exception else ""
    console.print(f"{run.path}: {counted(len(run.steps), 'sample')}; {end}{broken}", markup=False)
    if run.resumed is not None:
        console.print("  It resumed another run: rules other than its own know nothing of what was before.")
    alerts = fired(replayed.alerts)
    if alerts:
        table = _table(console, "rule", "severity", ">fired", ">places", "now", ">lead")
        for name in dict.fromkeys(alert.rule for alert in alerts):
            same = [alert for alert in alerts if alert.rule == name]
            standing = sum(alert.state == "firing" for alert in same)
            now = "firing" if standing == len(same) else f"{standing} firing" if standing else "resolved"
            lead = "" if name == DIVERGENCE else _number(replayed.leads.get(name))
            places = str(len({alert.place for alert in same}))
            table.add_row(_text(name), same[0].severity, _number(same[0].fired_step), places, now, lead)
        console.print(table)
    else:
        console.print("  no alert fired")
    if finding.changes is not None:
        _show_changes(finding.changes, console)
    _show_crossings(finding, console)
    console.print()


def _show_changes(changes: Sequence[Change], console: Console) -> None:
    """Against what the run recorded."""
    if not changes:
        console.print("Against what was recorded: nothing differs.")
        return
    table = _table(console, "against what was recorded", "place", ">then", ">now", "difference")
    for change in changes[:MOST_CHANGES]:
        table.add_row(
            _text(change.rule), _text(change.place), _number(change.before), _number(change.now), said(change)
        )
    console.print(table)
    if len(changes) > MOST_CHANGES:
        console.print(f"{len(changes) - MOST_CHANGES} more; --json gives all of them.")


def said(change: Change) -> str:
    """What became of an alert, in words."""
    if change.before is None:
        return "fires only now"
    if change.now is None:
        return "fired only then"
    steps = change.now - change.before
    return f"{abs(steps):,} {'step' if abs(steps) == 1 else 'steps'} {'later' if steps > 0 else 'earlier'}"


def _show_crossings(finding: Finding, console: Console) -> None:
    table = _table(console, "which number moved first", ">step", ">before divergence", "remark")
    for row in order(finding.replay.alerts, finding.replay.divergence, finding.crossings):
        table.add_row(*map(_text, row[:4]))
    console.print(table)


def _show_all(findings: Sequence[Finding], console: Console) -> None:
    table = _table(console, "run", ">diverged", "first warning", ">fired", ">lead", "first number to cross", ">crossed")
    for finding in findings:
        first = next(iter(warnings(finding.replay.alerts)), None)
        moved = next((each for each in finding.crossings if each.step is not None and not each.from_start), None)
        alert = ("", "") if first is None else (first.rule, _number(first.fired_step))
        crossed = ("", "") if moved is None else (moved.name, _number(moved.step))
        cells = (_number(finding.replay.divergence), *alert, _number(finding.replay.lead), *crossed)
        table.add_row(_text(finding.run.path.name), *map(_text, cells))
    console.print(table)
    console.print(sentence(_score(findings)), markup=False)


def sentence(total: Score) -> str:
    """The score in words that say what was counted."""
    leads = "" if total.median is None else f" (lead: median {total.median:,.0f} steps, least {total.least:,})"
    return (
        f"Detected before the loss diverged: {total.detected} of {total.diverged} diverged runs{leads}. Of the "
        f"{total.others} runs that did not diverge, {total.alarmed} had a warning or critical alert about attention; "
        "a collapse whose loss only gets worse is one of these, so look before calling it false."
    )


def _score(findings: Sequence[Finding]) -> Score:
    return score(Outcome.of(finding.replay) for finding in findings)


def _table(console: Console, *columns: str) -> Table:
    """Columns with ">" in front are numbers."""
    plain_text = not console.is_terminal
    table = Table(
        box=None if plain_text else box.SIMPLE_HEAD,
        header_style="none" if plain_text else "bold",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _text(value: str) -> Text:
    """Never markup, whatever is in a name."""
    return Text(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
