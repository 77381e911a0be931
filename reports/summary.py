"""What a run amounts to: one verdict, and summary.json (docs/report.md). What a lead is stands in monitor/leads.py."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnwatch.monitor import leads as measured
from attnwatch.monitor.leads import DIVERGENCE, GRAVE, SEEN_APART
from attnwatch.monitor.run import HEADER
from attnwatch.monitor.sample import UsageError
from attnwatch.reports.facts import cost, from_checkpoints, state, text
from attnwatch.reports.known import proofs

if TYPE_CHECKING:
    from attnwatch.monitor.alerts import Alert
    from attnwatch.monitor.run import Run

COLLAPSE = ("sparse_low_rank", "entropy_collapse")
STATES = ("diverged", "collapsed", "critical", "warning", "unknown", "healthy")
"""Of a verdict, the gravest first."""
FORMAT = 1
"""Of summary.json: raised when a name changes its meaning or goes; new names may come any time."""


def summarize(run: Run) -> dict[str, Any]:
    """The run as JSON-able data: verdict, leads, alerts, coverage, problems and cost. Non-finite numbers are None."""
    kind, sentence = verdict(run)
    worst = main_alert(run)
    return {
        "format": FORMAT,
        "run": run.path.name,
        "verdict": {"state": kind, "sentence": sentence},
        "ended": run.ended,
        "exception": run.exception or None,
        "last_step": last_step(run),
        "samples": len(run.steps),
        "divergence_step": onset(run),
        "lead": lead(run),
        "leads": leads(run),
        "main_alert": None if worst is None else plain(asdict(worst)),
        "alerts": [plain(asdict(alert)) for alert in run.alerts],
        "coverage": counts(run),
        "problems": [plain(asdict(problem)) for problem in run.problems],
        "seconds": cost(run).seconds,
    }


def write_summary(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Of one run its summary, of several a list, as JSON. Raises UsageError where it cannot be written."""
    summaries = [summarize(run) for run in runs]
    content = json.dumps(summaries[0] if len(runs) == 1 else summaries, indent=1, allow_nan=False)
    write_whole(Path(path), content + "\n")


def summary_of(page: Path) -> Path:
    """The summary beside a page: each page of a directory has its own, and report.html has summary.json."""
    return page.with_name("summary.json" if page.stem == "report" else f"{page.stem}.summary.json")


def check_summary(path: Path) -> None:
    """Raises UsageError where a file of that name of another program is: that is never overwritten. In a run directory
    the name is ours, and what is torn there is made anew."""
    if path.with_name(HEADER).exists():
        return
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {"verdict": None}
    except ValueError:
        found = None
    each = found[0] if isinstance(found, list) and found else found
    if not (isinstance(each, dict) and "verdict" in each):
        raise UsageError(
            f"expected no other {path.name} beside the page, found {str(path)!r}; write the page elsewhere"
        )


def write_whole(target: Path, content: str) -> None:
    """A reader sees the old file or the new one whole. Raises UsageError where it cannot be written."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(content, encoding="utf-8")
        os.replace(scratch, target)
    except OSError as error:
        scratch.unlink(missing_ok=True) if scratch.parent.is_dir() else None
        raise UsageError(
            f"expected a place to write the report, found {str(target)!r} ({error.strerror}); give another file"
        ) from error


def fired(run: Run, *severities: str) -> list[Alert]:
    """Alerts that fired, first one first; only of these severities when some are given."""
    return measured.fired(run.alerts, *severities)


def main_alert(run: Run) -> Alert | None:
    """The first critical alert about attention, else the first warning, else the loss's own; None when all is quiet."""
    for severity in ("critical", "warning"):
        about_attention = [alert for alert in fired(run, severity) if alert.rule not in SEEN_APART]
        if about_attention:
            return about_attention[0]
    return next((alert for alert in fired(run) if alert.rule == DIVERGENCE), None)


def advising(run: Run) -> Alert | None:
    """The alert whose advice counts: the main one, but that of the loss where the loss broke first. A checkpoint from
    before the main alert would then be one from after the divergence."""
    alert, start = main_alert(run), onset(run)
    if alert is None or start is None or alert.pending_step <= start:
        return alert
    return next(each for each in fired(run) if each.rule == DIVERGENCE)


def onset(run: Run) -> int | None:
    """First step of the streak that made `loss_divergence` fire; None when it never did."""
    return measured.onset(run.alerts)


def leads(run: Run) -> dict[str, int]:
    """Steps between each collapse rule's first alert still standing at the onset of divergence, and that onset."""
    return measured.leads(run.alerts, onset(run), COLLAPSE)


def lead(run: Run) -> int | None:
    """The longest of `leads`; None without a divergence or without an alert of collapse."""
    return max(leads(run).values(), default=None)


def lead_alert(run: Run) -> Alert | None:
    """The alert that `lead` counts from, the gravest rule's where several fired at once."""
    start, found = onset(run), leads(run)
    if start is None or not found:
        return None
    name = max(found, key=lambda rule: (found[rule], -COLLAPSE.index(rule)))
    return next(a for a in fired(run) if (a.rule, start - (a.fired_step or 0)) == (name, found[name]))


def last_step(run: Run) -> int | None:
    """The newest step that left a sample or a scalar."""
    ends = [int(run.steps[-1])] if len(run.steps) else []
    ends += [int(run.scalar(name)[0][-1]) for name in run.scalar_names if len(run.scalar(name)[0])]
    return max(ends, default=None)


def counts(run: Run) -> dict[str, int]:
    """How many layers are in each state of coverage; those of saved weights are "placed" at best."""
    states = [state(run, layer) for layer in run.coverage]
    best = "placed" if from_checkpoints(run) else "verified"
    return {name: states.count(name) for name in (best, "logits_only", "uncovered")}


def blindness(run: Run) -> str | None:
    """Why nothing can be said of the attention; None when some of it was measured."""
    if run.coverage and counts(run)["uncovered"] == len(run.coverage):
        return f"none of its {len(run.coverage)} attention layers could be measured"
    if not len(run.steps):
        return "no sample was recorded"
    if not any(np.isfinite(sample.values).any() for sample in run.iter_samples()):
        return "its samples hold no number"
    return None


def verdict(run: Run) -> tuple[str, str]:
    """State (of STATES) and one sentence."""
    start, blind = onset(run), blindness(run)
    alerts = measured.warnings(run.alerts)
    critical = [alert for alert in alerts if alert.severity == "critical"]
    collapse = next((alert for alert in critical if alert.rule in COLLAPSE), None)
    if start is not None:
        return "diverged", f"The loss diverged from step {start:,}{_foresight(run, start, blind)}."
    if collapse is not None:
        return "collapsed", f"Attention collapsed at step {_told(collapse)}{_since(run, collapse)}{_limits(run)}."
    if critical:
        return "critical", f"{critical[0].rule} fired at step {_told(critical[0])}{_limits(run)}."
    if blind is not None:
        return "unknown", f"Could not tell whether attention is healthy: {blind}."
    if alerts:
        return "warning", f"{alerts[0].rule} warned at step {_told(alerts[0])}{_since(run, alerts[0])}{_limits(run)}."
    if from_checkpoints(run):
        return "unknown", (
            "Could not tell from weights alone whether attention is healthy: nothing in them is alarming, but how "
            f"sharp attention is depends on what goes through them{''.join(f'; {part}' for part in _unseen(run))}."
        )
    asked = _longest_hold(run)
    if len(run.steps) < asked:
        return "unknown", (
            f"Could not tell whether attention is healthy: an alarm needs {asked} samples in a row, and "
            f"{len(run.steps)} {'was' if len(run.steps) == 1 else 'were'} recorded."
        )
    coming = next((a for a in run.alerts if a.state == "pending" and a.severity in GRAVE), None)
    if coming is not None:
        since = f"though {coming.rule} has been met since step {coming.pending_step:,}, not long enough to fire"
        return "healthy", f"Healthy{_limits(run)}, {since}."
    return "healthy", f"Healthy{_limits(run) or ': attention stayed clear of every alarm'}."


def where(alert: Alert) -> str:
    """Which heads an alert is about, shortly: how many, and the worst; empty when it is about none."""
    if not alert.heads:
        return ""
    layer, head = text(alert.heads[0][0], 100), alert.heads[0][1]
    worst = f"worst in {layer} head {head}"
    of_all = alert.place == "model" and isfinite(alert.share)
    return f"{alert.share * 100:.0f}% of the heads, {worst}" if of_all else worst


def _told(alert: Alert) -> str:
    """When an alert fired and about which heads."""
    return f"{alert.fired_step:,}" + (f" ({where(alert)})" if alert.heads else "")


def _foresight(run: Run, start: int, blind: str | None) -> str:
    steps = lead(run)
    if steps is not None and steps > 0:
        first = lead_alert(run)
        said = f" ({where(first)})" if first is not None and first.heads else ""
        return f"; attention had given warning {steps:,} {'step' if steps == 1 else 'steps'} before{said}"
    if steps is not None:
        return f"; the alert on attention came {f'{-steps:,} steps after' if steps else 'at that very step'}"
    if blind is not None:
        return f"; attention could not warn, since {blind}"
    return "; no alert of attention collapse stood at that step"


def _since(run: Run, alert: Alert) -> str:
    if alert.resolved_step is not None:
        return f" and recovered by step {alert.resolved_step:,}"
    return "; the loss has not diverged" if alert.rule in COLLAPSE and "loss" in run.scalar_names else ""


def _longest_hold(run: Run) -> int:
    """Samples in a row that the most patient critical rule about attention waits for."""
    rules = [rule for rule in run.rules if rule.get("severity") == "critical" and rule.get("name") not in SEEN_APART]
    return max((rule["hold"] for rule in rules if isinstance(rule.get("hold"), int)), default=1)


def _limits(run: Run) -> str:
    """What weakens a verdict: what was not seen, and a run that has not ended."""
    parts = _unseen(run)
    so_far = "" if run.ended else " so far"
    return f"{so_far}, as far as seen: {' and '.join(parts)}" if parts else so_far


def _unseen(run: Run) -> list[str]:
    """Layers that were not seen, and a loss that was not passed."""
    seen, parts = counts(run), []
    if seen["uncovered"]:
        were = "was" if seen["uncovered"] == 1 else "were"
        parts.append(f"{seen['uncovered']} of {len(run.coverage)} layers {were} not covered")
    proved = proofs(run)
    without = [proved.get(layer.name) for layer in run.coverage if layer.state == "logits_only"]
    lost = [proof.until for proof in without if proof is not None and proof.until is not None]
    if len(without) > len(lost):
        parts.append(f"{len(without) - len(lost)} of {len(run.coverage)} layers gave no spectrum")
    if lost:
        parts.append(f"{len(lost)} of {len(run.coverage)} layers gave no spectrum from step {min(lost):,} on")
    if "loss" not in run.scalar_names and not from_checkpoints(run):
        parts.append("no loss was passed")
    return parts


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
