"""One self-contained page about one or several runs: no network, readable without JavaScript, at most 5 MB."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnwatch.monitor.outputs.log import one_line
from attnwatch.monitor.sample import Coverage, UsageError
from attnwatch.reports import charts, compare, curves, facts, heat, overlay
from attnwatch.reports.charts import copyable, number
from attnwatch.reports.crossings import crossings
from attnwatch.reports.every import Maps, detail_of, every_metric
from attnwatch.reports.known import proofs
from attnwatch.reports.order import ONE_RUN, order
from attnwatch.reports.spectra import LEGEND, LOOKS, spectra
from attnwatch.reports.summary import (
    STATES,
    advising,
    check_summary,
    last_step,
    lead,
    main_alert,
    onset,
    summarize,
    summary_of,
    verdict,
    write_summary,
    write_whole,
)
from attnwatch.reports.timeline import Axes, axes, series, timeline
from attnwatch.reports.worst import worst_heads

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run

TABLE_LINES = 200
"""Rows of a table of alerts or problems; the page says how many more there are."""
POINTS_IN_TABLE = 16
_ERROR = re.compile(r"\d(?:\.\d+)?e[-+]\d+")
_CHANGES = 5
"""Changes of the interval that are listed."""
"""How exactly a layer was proved, in its note."""
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
    write_whole(target, render(runs))
    return target


def write_page_and_summary(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """The page and, beside it, its summary; the page's path. Raises UsageError where they cannot be written."""
    beside = summary_of(Path(path))
    check_summary(beside)
    page = write_report(runs, path)
    write_summary(runs, beside)
    return page


def render(runs: Sequence[Run]) -> str:
    """The page as text. Raises UsageError without a run."""
    if not runs:
        raise UsageError("expected at least one run to report on, found none; give a run directory")
    if len(runs) > MOST_DRAWN:  # those that are drawn should be those that somebody looks for
        runs = sorted(runs, key=lambda run: STATES.index(verdict(run)[0]))
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
            outcomes=list(zip(compare.outcomes(runs), map(overlay.swatch, overlay.lines(runs)), strict=True)),
            overlay=overlay.overlay(runs, shared) if many else Markup(""),
            groups=sheet.groups,
            detail=detail,
            thinned=any(len(run.steps) > detail.points for run in drawn),
            layers_left_out=any(len(run.layers) > detail.layers for run in drawn),
            not_drawn=len(runs) - len(drawn),
            legend=heat.legend(),
            moments=LEGEND,
            looks=LOOKS,
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
        finalize=lambda value: one_line(value) if type(value) is str else value,  # not what is markup already
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = facts.text
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
        "advising": advising(run),
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
        "coverage": grouped_coverage(_with_past(run)),
        "last_step": last_step(run),
        "cost": facts.cost(run),
        "middle": float(np.median(run.seconds)) if len(run.seconds) else float("nan"),
        "intervals": _intervals(run),
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
    return "0", f"alarms in {facts.counted(len(run.steps), 'sample')} of {facts.counted(len(run.layers), 'layer')}"


def grouped_coverage(layers: Iterable[Coverage]) -> list[tuple[str, Coverage]]:
    """Neighbours that are verified and alike share a row, with the note of the least exact one; any other layer has
    its own."""
    rows: list[tuple[list[str], Coverage]] = []
    for layer in layers:
        if rows and layer.state == "verified" and _alike(layer) == _alike(rows[-1][1]):
            names, last = rows[-1]
            rows[-1] = ([*names, layer.name], max(last, layer, key=lambda each: _error(each.note)))
        else:
            rows.append(([layer.name], layer))
    return [
        (
            facts.text(names[0]) + ("" if len(names) == 1 else f" to {facts.text(names[-1])} ({len(names)} layers)"),
            layer,
        )
        for names, layer in rows
    ]


def _with_past(run: Run) -> Iterator[Coverage]:
    """The layers; of one that is not proved any more the note says until when it was, and how."""
    proved = proofs(run)
    for layer in run.coverage:
        proof = proved.get(layer.name)
        if proof is None or proof.until is None:
            yield layer
        else:
            before = f"verified before step {proof.until:,} ({proof.layer.note})"
            yield replace(layer, note=f"{before}; since then: {layer.note}")


def _alike(layer: Coverage) -> Coverage:
    """What neighbours must share: all but their names and how exactly each was proved."""
    return replace(layer, name="", note=_ERROR.sub("", layer.note))


def _error(note: str) -> float:
    return max(map(float, _ERROR.findall(note)), default=0.0)


def _span(runs: Sequence[Run]) -> tuple[float, float]:
    """First and last step that any run knows of."""
    steps = [run.steps for run in runs] + [run.scalar(name)[0] for run in runs for name in run.scalar_names]
    known = [(int(each[0]), int(each[-1])) for each in steps if len(each)]
    return charts.span(min((a for a, _ in known), default=0), max((b for _, b in known), default=1))


def _intervals(run: Run) -> str:
    """How a budget changed the steps from sample to sample: the newest changes, and how many there were."""
    said = [
        f"every {interval:,} from step {step:,} ({share:.1%})" for step, interval, share in run.intervals[-_CHANGES:]
    ]
    before = len(run.intervals) - len(said)
    return "; ".join([*([f"{before:,} changes before these"] if before > 0 else []), *said])


def _number(value: float | None) -> str:
    return number(value)


def _stepped(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _sha256(text: str) -> str:
    """The source expression that lets a policy run this inline script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode("ascii")
