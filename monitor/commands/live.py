"""`attnwatch live`: a run on the screen while it is written."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnwatch.monitor.sample import UsageError

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run
    from attnwatch.reports.keys import View
    from attnwatch.reports.terminal import Terminal

_DEFAULT_METRIC, _OF_WEIGHTS = "entropy_ratio", "qk_rank_ratio"
"""Of a run, and of a scan, which knows no entropy."""
_PIPE_WIDTH = 400
"""Columns of a plain frame that no terminal limits: 128 heads with room for their layers' names, and long summaries."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "live",
        help="a run on the screen while it is written; keys: m metric, arrows layer and head, ? help, q quit",
        description="Follows a run directory from a process of its own; training does not notice. Waits for a run "
        "that is not there yet. Prints one plain frame with --once, without a terminal, with TERM=dumb or NO_COLOR, "
        "and where single keys cannot be read (Windows).",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, or one that holds runs: the newest")
    parser.add_argument("--once", action="store_true", help="print one plain frame and end")
    parser.add_argument("--metric", metavar="NAME", help=f"the metric to begin with (default: {_DEFAULT_METRIC})")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="from look to look at the run (default: 1)"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    if not 0.05 <= options.every < math.inf:
        raise UsageError(f"expected --every to be at least 0.05 seconds, found {options.every:g}; try --every 1")
    if options.once or not _has_screen():
        _print_once(options.run, options.metric)
        return 0
    from attnwatch.reports.terminal import terminal

    try:
        with terminal() as screen:
            _follow(screen, options.run, options.metric, options.every)
    except KeyboardInterrupt:
        return 130
    return 0


def _has_screen() -> bool:
    plain = os.environ.get("TERM", "dumb") in ("dumb", "unknown") or bool(os.environ.get("NO_COLOR"))
    return sys.platform != "win32" and not plain and sys.stdin.isatty() and sys.stdout.isatty()


def _print_once(path: Path, metric: str | None) -> None:
    from attnwatch.monitor.follow import Follower, find_run
    from attnwatch.reports.live import Look, frame

    found = find_run(path)
    follower = Follower(path if found is None else found.path)  # says what is wrong where there is no run
    encoding = sys.stdout.encoding or "ascii"
    look = Look(follower, time.time(), "" if found is None else found.note, not encoding.lower().startswith("utf"))
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    lines = frame(look, _first(follower.run, metric), width or _PIPE_WIDTH, None)
    text = "".join(f"{line.plain.rstrip()}\n" for line in lines)
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def _follow(screen: Terminal, path: Path, metric: str | None, every: float) -> None:
    """Until `q`, or until the keyboard is gone."""
    from attnwatch.monitor.follow import Follower, find_run
    from attnwatch.reports.keys import press
    from attnwatch.reports.live import Look, axes, frame, waiting, within

    while (found := find_run(path)) is None:
        screen.draw(waiting(path, *screen.size))
        keys = screen.keys(every)
        if keys is None or "q" in keys:
            return
    follower = Follower(found.path)
    view = _first(follower.run, metric)
    due = time.monotonic() + every
    while True:
        look = Look(follower, time.time(), found.note, screen.ascii_only)
        screen.draw(frame(look, view, *screen.size))
        keys = screen.keys(due - time.monotonic())
        if keys is None:
            return
        shown = axes(follower.run)
        for key in keys:
            pressed = press(within(view, shown), key, len(shown.metrics), len(shown.layers), shown.heads)
            if pressed is None:
                return
            view = pressed
        if time.monotonic() >= due:
            follower.look()
            due = time.monotonic() + every


def _first(run: Run, metric: str | None) -> View:
    """The view to begin with. Raises UsageError with the metrics that exist."""
    from attnwatch.reports.facts import from_checkpoints
    from attnwatch.reports.keys import View

    names = [each.name for each in run.metrics]
    if metric is None:
        usual = _OF_WEIGHTS if from_checkpoints(run) else _DEFAULT_METRIC
        return View(metric=names.index(usual) if usual in names else 0)
    if metric not in names:
        raise UsageError(f"expected a metric of this run, found {metric!r}; there are: {', '.join(names) or 'none'}")
    return View(metric=names.index(metric))
