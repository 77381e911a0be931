"""One look at a followed run as lines for a terminal: verdict, loss, layers x heads, alerts, problems, cost."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.text import Text

from attnwatch.monitor.alerts import SEVERITIES, Alert
from attnwatch.monitor.follow import Follower
from attnwatch.monitor.outputs.log import coverage_line, one_line
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage
from attnwatch.reports import grid
from attnwatch.reports.facts import cost, counted, from_checkpoints, state
from attnwatch.reports.glyphs import duration, short, sparkline
from attnwatch.reports.grid import Grid
from attnwatch.reports.keys import FOOTER, HELP, View
from attnwatch.reports.summary import last_step, verdict
from attnwatch.reports.words import READING

COLOURS = {
    "healthy": "green", "unknown": "yellow", "warning": "yellow", "critical": "bold red", "collapsed": "bold red",
    "diverged": "bold red", "info": "cyan",
}  # fmt: skip
"""Of verdicts and severities. The words beside them say the same."""

_ALERTS, _PROBLEMS, _GRID = 5, 3, 10
"""Lines: at most of alerts and of problems, and what the grid keeps of a low screen."""

_LEAST = 4
"""Lines of the grid that even the lowest screen has: title, scale, ruler and the chosen layer."""

_ROOMY = 24
"""Lines from which on a screen has room for what is well anyway."""

_MEASURED = {"verified", "logits_only"}
_STATES = ("firing", "pending", "resolved")


@dataclass(frozen=True)
class Look:
    """A followed run at one moment. now: unix seconds. note: how the run was chosen. ascii_only: what can be shown."""

    follower: Follower
    now: float
    note: str = ""
    ascii_only: bool = False

    @property
    def run(self) -> Run:
        return self.follower.run


@dataclass(frozen=True)
class Axes:
    """What can be chosen. layers: those that were sampled and those that never were; covered: what is known of each."""

    metrics: tuple[str, ...]
    layers: tuple[str, ...]
    covered: tuple[Coverage | None, ...]
    heads: int


def axes(run: Run) -> Axes:
    covered = {layer.name: layer for layer in run.coverage}
    layers = tuple(dict.fromkeys([*run.layers, *covered]))
    heads = max([run.heads, *(layer.heads for layer in run.coverage)])
    return Axes(tuple(metric.name for metric in run.metrics), layers, tuple(map(covered.get, layers)), heads)


def frame(look: Look, view: View, width: int, height: int | None) -> list[Text]:
    """At most `height` lines (None: as many as there are) of at most `width` cells."""
    if view.page == "help":
        lines = _help(width)
    else:
        is_roomy = height is None or height >= _ROOMY
        above, below = [*_above(look, width, is_roomy), *([Text()] if is_roomy else [])], _below(look)
        above = above if height is None else above[: max(height - 1 - _LEAST, 1)]
        room = None if height is None else max(height - 1 - len(above), _LEAST)
        if room is not None:  # what goes on is said shortly when there is little room
            below = below[: max(room - _GRID, 0)]
            room -= len(below)
        shown = _head if view.page == "head" else _grid
        lines = [*above, *shown(look, view, width, room), *below]
    if height is not None:
        lines = [*lines[: height - 1], *[Text()] * (height - 1 - len(lines)), Text(FOOTER, style="dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if not look.ascii_only else "crop")
    return lines


def waiting(path: Path, width: int, height: int) -> list[Text]:
    """The screen before there is a run."""
    said = _wrapped(f"Waiting for a run in {one_line(str(path))}: the directory that the trainer passes as run=", width)
    return [*said[: height - 1], *[Text()] * (height - 1 - len(said)), Text("q quit", style="dim")]


def _above(look: Look, width: int, is_roomy: bool) -> list[Text]:
    run, follower = look.run, look.follower
    silent = follower.is_silent(look.now)
    step = last_step(run)
    now = "ended" if run.ended else "silent" if silent else "running"
    parts = [one_line(run.path.resolve().name), now, "no step yet" if step is None else f"step {step:,}"]
    parts += [counted(len(run.steps), "sample")]
    parts += [f"{follower.ranks} ranks"] if follower.ranks > 1 else []
    kind, sentence = verdict(run)
    lines = [Text("attnwatch  ", style="bold") + Text("  ".join(parts))]
    lines += [Text(look.note, style="dim")] if look.note else []
    lines += _wrapped(one_line(sentence), width, COLOURS[kind])
    if follower.trouble:
        lines += _wrapped(f"! not read: {one_line(follower.trouble)}", width, "yellow")
    lines += _wrapped(_age(look, silent), width, "bold yellow" if silent else "")
    everything = all(layer.state == "verified" for layer in run.coverage)
    lines += [Text(_cost(run))] if is_roomy and len(run.steps) else []
    lines += [Text(one_line(_covered(run)))] if run.coverage and (is_roomy or not everything) else []
    return [*lines, _loss(run, width, look.ascii_only)]


def _covered(run: Run) -> str:
    said = coverage_line(run.coverage)
    return said.replace("layers verified", "layers placed", 1) if from_checkpoints(run) else said


def _age(look: Look, silent: bool) -> str:
    """How old the newest sample is, beside how often they came."""
    run, follower = look.run, look.follower
    if run.ended:
        by = f" by an exception: {one_line(run.exception)}" if run.exception else ""
        return f"The run has ended{by}: no sample will come."
    if not len(run.steps):
        return "! No sample yet, and nothing else is written." if silent else "No sample yet."
    age = max(look.now - float(run.times[-1]), 0.0)
    pace = "" if np.isnan(follower.pace) else f" (one every {duration(follower.pace)})"
    if not silent:
        return f"Last sample {duration(age)} ago{pace}."
    since = look.now - follower.written
    writes = since < age / 2
    why = "scalars or events are still written." if writes else "nothing is written: ended by force, stopped or paused?"
    return f"! No new sample for {duration(age)}{pace}; {why}"


def _cost(run: Run) -> str:
    found = cost(run)
    total = f"Sampling has taken {duration(found.seconds)}"
    return f"{total}." if math.isnan(found.share) else f"{total}, {found.share:.1%} of the time since the first sample."


def _loss(run: Run, width: int, ascii_only: bool) -> Text:
    if not run.scalar_names:
        said = (
            "Saved weights know no loss." if from_checkpoints(run) else "No loss: pass it as monitor.step(loss=loss)."
        )
        return Text(said, style="dim")
    name = "loss" if "loss" in run.scalar_names else run.scalar_names[0]
    steps, values = run.scalar(name)
    finite = values[np.isfinite(values)]
    least = f", lowest {finite.min():.4g}" if finite.size else ""
    said = f"{one_line(name)} {values[-1]:.4g} at step {steps[-1]:,}{least} "
    line = sparkline(np.where(np.isnan(values), np.inf, values), max(width - cell_len(said), 0), ascii_only)
    return Text(said + line)


def _grid(look: Look, view: View, width: int, height: int | None) -> list[Text]:
    shown = axes(look.run)
    if not shown.metrics or not shown.layers:
        return [Text("No layer is known yet: the first sample finds them.")]
    view = within(view, shown)
    made = _made(look, view, shown)
    place = one_line(shown.layers[view.layer])
    number = short(float(made.values[view.layer, view.head]))
    reading = READING.get(made.metric, "")
    foot = [Text(reading, style="dim")] if reading and (height is None or height > _GRID) else []
    foot += [Text(f"> {place} head {view.head}: {made.metric} {number}")]
    rows = len(shown.layers) + 3 if height is None else max(height - len(foot), 4)
    return [*grid.lines(made, view.layer, view.head, width, rows), *foot]


def _head(look: Look, view: View, width: int, height: int | None) -> list[Text]:
    """One head: its history of the chosen metric, and all its newest numbers."""
    run, shown = look.run, axes(look.run)
    if not shown.metrics or not shown.layers:
        return [Text("No layer is known yet: the first sample finds them.")]
    view = within(view, shown)
    layer, metric, covered = shown.layers[view.layer], shown.metrics[view.metric], shown.covered[view.layer]
    seen = "not sampled" if covered is None else f"{state(run, covered)} {one_line(covered.note)}".strip()
    history = run.history(metric, layer, view.head)
    finite = history[np.isfinite(history)]
    spanned = f"from {short(float(finite.min()))} to {short(float(finite.max()))}" if finite.size else "never measured"
    lines = [Text(f"{one_line(layer)} head {view.head}", style="bold"), Text(f"  {seen}", style="dim")]
    lines += [Text(f"  {one_line(metric)}: {len(finite)} of {len(history)} samples, {spanned}")]
    lines += [Text("  " + sparkline(history, width - 2, look.ascii_only))]
    lines += [Text(f"  {READING[metric]}", style="dim")] if metric in READING else []
    values = _values(look, shown)
    told = [
        f"{'>' if name == metric else ' '}{one_line(name):20} {short(float(values[at, view.layer, view.head])):>9}  "
        for at, name in enumerate(shown.metrics)
    ]
    columns = max(width // max(map(len, told)), 1)
    rows = -(-len(told) // columns)
    lines += [Text("".join(told[row::rows])) for row in range(rows)]
    if height is None or len(lines) <= height:
        return lines
    return [
        *lines[: height - 1],
        Text(f"  {len(lines) - height + 1} more lines: a higher window shows them", style="dim"),
    ]


def within(view: View, shown: Axes) -> View:
    """The view with what it names: a run may hold less than the one before it."""
    return View(
        min(view.metric, len(shown.metrics) - 1), min(view.layer, len(shown.layers) - 1),
        min(view.head, max(shown.heads - 1, 0)), view.page,
    )  # fmt: skip


def _made(look: Look, view: View, shown: Axes) -> Grid:
    notes = [_note(covered) for covered in shown.covered]
    names = grid.short_names([one_line(name) for name in shown.layers])
    widths = tuple(0 if covered is None else covered.heads for covered in shown.covered)
    return Grid(shown.metrics[view.metric], names, tuple(notes), widths, _values(look, shown)[view.metric])


def _note(covered: Coverage | None) -> str:
    """In place of heads, for a layer of which nothing is known: it must not look like a healthy one."""
    if covered is None or covered.state in _MEASURED:
        return ""
    return f"{covered.state}: {one_line(covered.note)}" if covered.note else covered.state


def _values(look: Look, shown: Axes) -> NDArray[np.float64]:
    """`[M, L, H]`: the newest numbers of all that is shown, NaN where nothing was measured."""
    values = np.full((len(shown.metrics), len(shown.layers), max(shown.heads, 1)), np.nan)
    known = look.follower.heads
    row = {name: index for index, name in enumerate(shown.layers)}
    places = [row[name] for name in known.layers]
    for at, name in enumerate(shown.metrics):
        if name in known.values:
            values[at, places, : known.values[name].shape[1]] = known.values[name]
    return values


def _below(look: Look) -> list[Text]:
    run = look.run
    told = sorted((alert for alert in run.alerts if _is_told(alert)), key=_urgency)
    states = Counter(alert.state for alert in told)
    said = ", ".join(f"{states[state]} {state}" for state in _STATES if states[state])
    lines = [Text(f"Alerts: {said or 'none'}", style="bold"), *(_alert(alert) for alert in told[:_ALERTS])]
    lines += _more(len(told) - _ALERTS)
    if run.problems:
        lines += [Text(f"Problems: {len(run.problems)}", style="bold")]
        newest = run.problems[: -_PROBLEMS - 1 : -1]
        lines += [Text(f"  step {each.step}: {one_line(each.where)}: {one_line(each.text)}") for each in newest]
        lines += _more(len(run.problems) - _PROBLEMS)
    return lines


def _is_told(alert: Alert) -> bool:
    """Not what was pending and never fired."""
    return alert.state in _STATES and (alert.state == "pending" or alert.fired_step is not None)


def _urgency(alert: Alert) -> tuple[int, int, int]:
    """Firing before pending before resolved, the gravest first, then the newest."""
    grave = SEVERITIES.index(alert.severity) if alert.severity in SEVERITIES else -1
    return _STATES.index(alert.state), -grave, -(alert.fired_step or alert.pending_step)


def _alert(alert: Alert) -> Text:
    when = {
        "firing": f"since step {alert.fired_step}", "pending": f"pending since step {alert.pending_step}",
        "resolved": f"from step {alert.fired_step} to {alert.resolved_step}",
    }[alert.state]  # fmt: skip
    colour = COLOURS.get(alert.severity, "") if alert.state == "firing" else "dim"
    told = f"{one_line(alert.rule)} at {one_line(alert.place)} {when}: {one_line(alert.summary)}"
    return Text(f"  {one_line(alert.severity)} ", style=colour) + Text(told)


def _more(count: int) -> list[Text]:
    return [Text(f"  and {count} more", style="dim")] if count > 0 else []


def _help(width: int) -> list[Text]:
    told = [line for keys, what in HELP for line in _wrapped(f"{keys}: {what}", width)]
    said = "Cells run from 0 (quiet) to 9 (loud); - was not measured, ! is not finite. Colours say the same. "
    said += "A number of the weights holds until it is measured again. What each metric means: docs/metrics.md."
    return [Text("Keys", style="bold"), *told, Text(), *_wrapped(said, width)]


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    return [Text(line, style=style) for line in textwrap.wrap(text, max(width, 1))]
