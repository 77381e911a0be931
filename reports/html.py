"""One self-contained page about one or several runs: no network, readable without JavaScript, at most 5 MB."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnwatch.monitor.sample import Coverage, UsageError
from attnwatch.reports import charts, compare, curves, facts, heat, overlay
from attnwatch.reports.charts import copyable, number
from attnwatch.reports.crossings import crossings
from attnwatch.reports.every import Maps, detail_of, every_metric
from attnwatch.reports.order import ONE_RUN, order
from attnwatch.reports.spectra import spectra
from attnwatch.reports.summary import fired, last_step, lead, main_alert, onset, summarize, write_summary
from attnwatch.reports.timeline import Axes, axes, series, timeline
from attnwatch.reports.worst import worst_heads

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run

TABLE_LINES = 200
"""Rows of a table of alerts or problems; the page says how many more there are."""
POINTS_IN_TABLE = 16
MOST_DRAWN = 6
"""Runs whose metrics and heads are drawn; of more runs the page compares what became of them and says so."""


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
    span = _span(runs)
    drawn = runs[:MOST_DRAWN]
    detail, shared = detail_of(drawn), axes(runs, span)
    sheet = every_metric(drawn, span, detail)
    all_maps = [*sheet.maps, *([None] * (len(runs) - len(drawn)))]
    many = len(runs) > 1
    return (
        _environment()
        .get_template("page.html")
        .render(
            runs=[
                _facts(run, name, shared, maps)
                for run, name, maps in zip(runs, facts.names(runs), all_maps, strict=True)
            ],
            differences=compare.differences(runs),
            outcomes=compare.outcomes(runs),
            overlay=overlay.overlay(runs, shared) if many else Markup(""),
            swatches=[overlay.swatch(line) for line in overlay.lines(runs)],
            groups=sheet.groups,
            detail=detail,
            thinned=any(len(run.steps) > detail.points for run in drawn),
            layers_left_out=any(len(run.layers) > detail.layers for run in drawn),
            not_drawn=len(runs) - len(drawn),
            legend=heat.legend(),
            ramps=list(heat.RAMPS),
            table=heat.table,
            table_lines=TABLE_LINES,
            one_run=ONE_RUN,
            metrics=list({metric.name: metric for run in runs for metric in run.metrics}.values()),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("attnwatch.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "copyable": copyable, "sha256": _sha256, "stepped": _stepped}
    return environment


def _facts(run: Run, name: str, shared: Axes, maps: Maps | None) -> dict[str, Any]:
    """What the template shows of one run beside the metrics that all runs share a chart of. maps: None where its heads
    are not drawn."""
    digits, caption = headline(run)
    return {
        "name": name,
        "run": run,
        "summary": summarize(run),
        "alert": main_alert(run),
        "digits": digits,
        "caption": caption,
        "onset": onset(run),
        "alerts": sorted(
            (a for a in run.alerts if a.fired_step is not None or a.state == "pending"),
            key=lambda a: (a.pending_step, a.rule),
        ),
        "timeline": timeline(run, shared),
        "series": series(run, shared.points),
        "order": order(run.alerts, onset(run), crossings(run)),
        "scalars": [(name, curves.some_points(run, name, POINTS_IN_TABLE)) for name in ("loss", "grad_norm")],
        "maps": maps or (None, None),
        "spectra": [] if maps is None else spectra(run),
        "worst": [] if maps is None else worst_heads(run),
        "coverage": grouped_coverage(run.coverage),
        "last_step": last_step(run),
        "cost": _cost(run),
        "facts": facts.facts(run),
        "rules": facts.rules(run),
        "weights_only": facts.from_checkpoints(run),
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
        known = facts.from_checkpoints(run) and len(run.steps)
        return "?", "weights alone cannot tell" if known else "nothing was measured that could be judged"
    samples = f"{len(run.steps):,} {'sample' if len(run.steps) == 1 else 'samples'}"
    return number(len(fired(run, "critical", "warning"))), f"alarms in {samples} of {len(run.layers)} layers"


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


def _span(runs: Sequence[Run]) -> tuple[float, float]:
    """First and last step that any run knows of."""
    steps = [run.steps for run in runs] + [run.scalar(name)[0] for run in runs for name in run.scalar_names]
    known = [(int(each[0]), int(each[-1])) for each in steps if len(each)]
    return charts.span(min((a for a, _ in known), default=0), max((b for _, b in known), default=1))


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
