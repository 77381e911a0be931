"""`attnwatch demo`: two small models trained and watched, while you wait."""

from __future__ import annotations

import argparse
import logging
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnwatch.monitor.sample import Update, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from attnwatch.monitor.run import Run


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train the same small model twice, without and with QK-norm, watched; about a minute",
        description="Trains a small attention-only transformer on the Python standard library's own source at a rate "
        "that climbs far too high: once as it is, once with query-key norm. Leaves two runs and report.html in DIR.",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="a new or empty directory (default: runs/demo-<date>-<time>)"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    out: Path = options.out or Path("runs") / datetime.now().strftime("demo-%Y%m%d-%H%M%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"expected a new or empty directory for --out, found {str(out)!r} in use; give another one")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from attnwatch.monitor import demo  # loads torch, seconds on a cold disk
    from attnwatch.monitor.store import open_run
    from attnwatch.reports.html import write_page_and_summary

    console = Console(highlight=False, soft_wrap=True)
    logging.getLogger("attnwatch").addHandler(logging.NullHandler())  # the screen says the same more shortly
    demo.one_thread()
    bars = Progress(
        TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    started = time.monotonic()
    with bars:
        for variant in demo.VARIANTS:
            console.print(f"{variant}: {demo.STEPS} steps", markup=False)
            bar = bars.add_task(variant, total=demo.STEPS, loss=float("nan"))
            demo.train(variant, out / variant, [_Screen(bars, bar)])
    runs = [open_run(out / variant) for variant in demo.VARIANTS]
    page = write_page_and_summary(runs, out / "report.html")
    for each in runs:
        console.print(f"{each.path.name:8} {_outcome(each)}", markup=False)
    console.print(f"{time.monotonic() - started:.0f} s; the report on both: {page}", markup=False)
    return 0


class _Screen:
    """An output of the demo: a progress bar, and above it a line for every alert of weight and every problem."""

    def __init__(self, bars: Progress, bar: TaskID) -> None:
        self._bars, self._bar = bars, bar
        self._problems = 0

    def write(self, update: Update) -> None:
        self._bars.update(self._bar, completed=update.step + 1, loss=update.scalars.get("loss", float("nan")))
        for alert in update.changed:
            if alert.state == "firing" and alert.severity != "info":
                self._print(f"step {alert.fired_step}: {alert.severity}: {alert.rule}: {alert.summary}")
        for problem in update.problems[self._problems :]:
            self._print(f"step {problem.step}: problem: {problem.where}: {problem.text}")
        self._problems = len(update.problems)

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, text: str) -> None:
        self._bars.console.print(f"  {text}", markup=False)


def _outcome(run: Run) -> str:
    """Which alert of collapse fired when, how many steps before the loss diverged, and where the loss ended."""
    from attnwatch.reports.summary import COLLAPSE, fired, leads, onset

    diverged, ahead = onset(run), leads(run)
    first = {alert.rule: alert for alert in reversed(fired(run, "warning", "critical")) if alert.rule in COLLAPSE}
    loss = run.scalar("loss")[1][-20:]
    parts = [
        f"{alert.rule} fired at step {alert.fired_step}" + (f", {ahead[rule]} steps ahead" if rule in ahead else "")
        for rule, alert in sorted(first.items(), key=lambda item: item[1].fired_step or 0)
    ]
    parts.append("the loss did not diverge" if diverged is None else f"the loss diverged at step {diverged}")
    parts.append(f"final loss {loss.mean():.2f} (mean of the last {len(loss)} steps)")
    return "; ".join(parts if first else ["no alert", *parts])
