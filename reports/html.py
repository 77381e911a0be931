"""One self-contained page about one or several runs: no network, readable without JavaScript, at most 5 MB."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnwatch.monitor.predictors import first_crossings
from attnwatch.monitor.sample import Coverage, Metric, UsageError
from attnwatch.reports import heat
from attnwatch.reports.charts import Scale, number
from attnwatch.reports.heads import heat_maps, worst_heads
from attnwatch.reports.order import ONE_RUN, order
from attnwatch.reports.panels import Detail, panel, reduce, thresholds, value_scale
from attnwatch.reports.summary import fired, last_step, lead, main_alert, onset, summarize, write_summary
from attnwatch.reports.timeline import loss_scale, timeline
from attnwatch.reports.words import GROUPS, READING

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run

LINE_POINTS = 400_000
"""Points of all lines of a page: about 2.3 MB."""
HEAT_PIXELS = 1_200_000
"""Pixels of all heat maps of a page: at most 1.6 MB, as base64 of what hardly compresses."""
TABLE_LINES = 200
"""Rows of a table of alerts or problems; the page says how many more there are."""


def write_report(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Write the page; a reader sees the old one or the new one whole. Raises UsageError where it cannot be written,
    and for a file that is there and no page: a recording, say.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm") and target.is_file():
        raise UsageError(
            f"expected a page (.html) or a new file, found {str(target)!r}, which is none; give another file"
        )
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    page = render(runs)
    try:
        scratch.write_text(page, encoding="utf-8")
        os.replace(scratch, target)
    except OSError as error:
        scratch.unlink(missing_ok=True) if scratch.parent.is_dir() else None
        raise UsageError(
            f"expected a place to write the report, found {str(target)!r} ({error.strerror}); give another file"
        ) from error
    return target


def write_page_and_summary(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """The page and, beside it, summary.json; the page's path. Raises UsageError where they cannot be written."""
    page = write_report(runs, path)
    write_summary(runs, page.with_name("summary.json"))
    return page


def render(runs: Sequence[Run]) -> str:
    """The page as text. Raises UsageError without a run."""
    if not runs:
        raise UsageError("expected at least one run to report on, found none; give a run directory")
    environment = Environment(
        loader=PackageLoader("attnwatch.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "sha256": _sha256, "stepped": _stepped}
    span = _span(runs)
    detail, loss = _detail(runs), loss_scale(runs)
    return environment.get_template("page.html").render(
        runs=[_facts(run, span, loss, HEAT_PIXELS // len(runs)) for run in runs],
        differences=differences([run.header for run in runs]),
        groups=_groups(runs, span, detail),
        detail=detail,
        thinned=any(len(run.steps) > detail.points for run in runs),
        layers_left_out=any(len(run.layers) > detail.layers for run in runs),
        legend=heat.legend(),
        ramps=list(heat.RAMPS),
        table=heat.table,
        table_lines=TABLE_LINES,
        one_run=ONE_RUN,
        metrics=list({metric.name: metric for run in runs for metric in run.metrics}.values()),
    )


def _facts(run: Run, span: tuple[float, float], loss: Scale, pixels: int) -> dict[str, Any]:
    """What the template shows of one run beside the metrics that all runs share a chart of."""
    summary = summarize(run)
    alert = main_alert(run)
    digits, caption = headline(run)
    return {
        "name": run.path.name,
        "run": run,
        "summary": summary,
        "alert": alert,
        "digits": digits,
        "caption": caption,
        "onset": onset(run),
        "alerts": sorted(
            (a for a in run.alerts if a.fired_step is not None or a.state == "pending"),
            key=lambda a: (a.pending_step, a.rule),
        ),
        "timeline": timeline(run, span, loss),
        "order": order(run.alerts, onset(run), first_crossings(run)),
        "losses": _losses(run),
        "heat": heat_maps(run, pixels),
        "worst": worst_heads(run),
        "coverage": grouped_coverage(run.coverage),
        "last_step": last_step(run),
        "cost": _cost(run),
        "options": dict(run.header.get("options", {})),
        "versions": dict(run.header.get("versions", {})),
    }


def headline(run: Run) -> tuple[str, str]:
    """The number that matters most about a run, and what it counts."""
    ahead, start, alert = lead(run), onset(run), main_alert(run)
    if ahead is not None:
        unit = "step" if abs(ahead) == 1 else "steps"
        words = "of warning before the loss diverged" if ahead > 0 else "after the loss began to diverge"
        return number(abs(ahead)), f"{unit} {words}" if ahead else "steps: alert and divergence came together"
    if start is not None:
        return number(start), "the step from which the loss diverged"
    if alert is not None and alert.fired_step is not None:
        return number(alert.fired_step), f"the step at which {alert.rule} fired"
    if summarize(run)["verdict"]["state"] == "unknown":
        return "?", "nothing was measured that could be judged"
    samples = f"{len(run.steps):,} {'sample' if len(run.steps) == 1 else 'samples'}"
    return number(len(fired(run, "critical", "warning"))), f"alarms in {samples} of {len(run.layers)} layers"


def differences(headers: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Facts of the headers that are not the same in all runs: (name, a value a run)."""
    if len(headers) < 2:
        return []
    flat = [
        {key: str(header[key]) for key in ("model", "parameters", "attnwatch") if key in header}
        | {str(key): str(value) for key, value in dict(header.get("options", {})).items()}
        | {f"{key} version": str(value) for key, value in dict(header.get("versions", {})).items()}
        for header in headers
    ]
    names = dict.fromkeys(name for facts in flat for name in facts)
    rows = [(name, [facts.get(name, "not set") for facts in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def grouped_coverage(layers: Sequence[Coverage]) -> list[tuple[str, Coverage]]:
    """Neighbours that are verified and alike share a row; any other layer has its own."""
    rows: list[tuple[list[str], Coverage]] = []
    for layer in layers:
        facts = (layer.state, layer.heads, layer.kv_heads, layer.head_dim, layer.qk_norm, layer.note, layer.dtype)
        if rows and layer.state == "verified":
            last = rows[-1][1]
            if facts == (last.state, last.heads, last.kv_heads, last.head_dim, last.qk_norm, last.note, last.dtype):
                rows[-1][0].append(layer.name)
                continue
        rows.append(([layer.name], layer))
    return [
        (names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} layers)", layer)
        for names, layer in rows
    ]


def _groups(runs: Sequence[Run], span: tuple[float, float], detail: Detail) -> list[dict[str, Any]]:
    """The charts of every metric, by group; and by name those that no run measured."""
    known = {metric.name: metric for run in runs for metric in run.metrics}
    named = {name for group in GROUPS for name in group.metrics}
    others = [name for name in known if name not in named]
    plans = [(group.title, group.text, [name for name in group.metrics if name in known]) for group in GROUPS]
    groups = []
    for title, text, names in [*plans, ("Other metrics", "", others)]:
        shown = [_chart(runs, known[name], span, detail) for name in names]
        charts, silent = [c for c in shown if c["measured"]], [c["metric"].name for c in shown if not c["measured"]]
        if shown:
            groups.append({"title": title, "text": text, "charts": charts, "silent": silent})
    return groups


def _chart(runs: Sequence[Run], metric: Metric, span: tuple[float, float], detail: Detail) -> dict[str, Any]:
    parts = []
    for run in runs:
        has = metric.name in {each.name for each in run.metrics}
        values = run.metric(metric.name) if has else np.zeros((0, 0, 0), np.float32)
        parts.append(reduce(run.steps if has else run.steps[:0], values, metric, detail))
    lines = thresholds(metric.name, [rule for run in runs for rule in run.rules])
    measured = any(part.table for part in parts)
    y = value_scale(metric.name, parts, lines) if measured else None
    return {
        "metric": metric,
        "reading": READING.get(metric.name, metric.help),
        "measured": measured,
        "log": y is not None and y.log,
        "lines": [line for line in lines if y is not None and y.holds(line.value)],
        "panels": [
            (run.path.name, panel(run, metric.name, part, span, y, lines) if y is not None else Markup(""), part.table)
            for run, part in zip(runs, parts, strict=True)
        ],
    }


def _detail(runs: Sequence[Run]) -> Detail:
    """Points a line and lines a chart that keep the page within its size."""
    layers = min(64, max(8, LINE_POINTS // (40 * sum(max(len(run.metrics), 1) for run in runs))))
    lines = sum(len(run.metrics) * (min(len(run.layers), layers) + 2) for run in runs)
    return Detail(min(500, max(40, LINE_POINTS // max(lines, 1))), layers)


def _span(runs: Sequence[Run]) -> tuple[float, float]:
    """First and last step that any run knows of."""
    steps = [run.steps for run in runs] + [run.scalar(name)[0] for run in runs for name in run.scalar_names]
    known = [(int(each[0]), int(each[-1])) for each in steps if len(each)]
    first, last = min((a for a, _ in known), default=0), max((b for _, b in known), default=1)
    return float(first), float(max(last, first + 1))


def _losses(run: Run) -> list[tuple[int, float]]:
    """A few points of the loss curve, for the table under it."""
    if "loss" not in run.scalar_names:
        return []
    steps, values = run.scalar("loss")
    rows = np.unique(np.linspace(0, len(steps) - 1, 16).round().astype(int))
    return [(int(steps[row]), float(values[row])) for row in rows]


def _cost(run: Run) -> dict[str, float]:
    """Seconds: all samples together, the median one, and their share of the run's wall time (NaN if unknown)."""
    total = float(np.nansum(run.seconds))
    wall = float(run.times[-1] - run.times[0]) if len(run.times) > 1 else 0.0
    middle = float(np.median(run.seconds)) if len(run.seconds) else float("nan")
    return {"total": total, "median": middle, "share": total / wall if wall > 0 else float("nan")}


def _number(value: float | None) -> str:
    return number(value)


def _stepped(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _sha256(text: str) -> str:
    """The source expression that lets a policy run this inline script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode("ascii")
