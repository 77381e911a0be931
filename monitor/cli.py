"""The command line. Exit codes: 0; 1, an alert that `--fail-on` asks for; 2, wrong use or unreadable input."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.sample import Update, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from attnwatch.monitor.run import Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails once more
        return 0
    except (UsageError, OSError) as error:
        print(f"attnwatch: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Exception as error:  # never the exit code of an alert
        text = " ".join(str(error).split())[:300]
        print(
            f"attnwatch: expected a run as attnwatch writes it, found {type(error).__name__}: {text}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("attnwatch: stopped; what was recorded is kept", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Wrong use is one line, as every other error of ours."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"attnwatch: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="attnwatch",
        description="Watches the attention of a transformer while it trains. In a trainer: attnwatch.watch(model).",
        epilog="Exit codes: 0; 1, an alert that --fail-on asks for fired; 2, wrong use or unreadable input.",
    )
    parser.add_argument("--version", action="version", version=f"attnwatch {version('attnwatch')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train the same small model twice, without and with QK-norm, watched; about a minute",
        description="Trains a small attention-only transformer on the Python standard library's own source at a rate "
        "that climbs far too high: once as it is, once with query-key norm. Leaves two runs and report.html in DIR.",
    )
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="a new or empty directory (default: runs/demo-<date>-<time>)"
    )
    demo.set_defaults(command=_demo)

    report = commands.add_parser(
        "report",
        help="one HTML page for one or several runs",
        description="Writes one self-contained page, also of a run that was killed or still goes on, and summary.json "
        "beside it. For one run both go into its directory.",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory, or one that holds runs")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (several runs: ./report.html)")
    report.add_argument(
        "--fail-on", choices=SEVERITIES, metavar="SEVERITY",
        help="exit 1 when an alert of this severity (info, warning, critical) or a graver one fired",
    )  # fmt: skip
    report.set_defaults(command=_report)

    replay = commands.add_parser(
        "replay",
        help="rules over stored runs: what would have fired when, and how many steps before the loss",
        description="Asks rules of stored runs as they were asked live. Without --rules each run is asked its own. "
        "Leads are steps from a warning that still stood to the step at which the loss began to diverge.",
    )
    replay.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory, or one that holds runs")
    replay.add_argument("--rules", type=Path, metavar="FILE", help="other rules; shows how they differ from the run")
    replay.add_argument(
        "--sweep", metavar="METRIC=a:b:n",
        help="replay with n numbers from a to b in place of those that the rules compare METRIC with",
    )  # fmt: skip
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.set_defaults(command=_replay)

    rules = commands.add_parser(
        "rules",
        help="the default rules as TOML, to edit",
        description="Prints the default rules; edit a copy and pass it as attnwatch.watch(model, rules=FILE).",
    )
    rules.add_argument("--out", type=Path, metavar="FILE", help="write to a new file instead")
    rules.set_defaults(command=_rules)
    return parser


# --- demo ------------------------------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
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
    for run in runs:
        console.print(f"{run.path.name:8} {_outcome(run)}", markup=False)
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
    """When the alert fired, when the loss diverged, the lead, and where the loss ended."""
    from attnwatch.reports.summary import fired, lead, main_alert, onset

    first = main_alert(run) if fired(run, "warning", "critical") else None
    diverged, ahead = onset(run), lead(run)
    loss = run.scalar("loss")[1][-20:]
    parts = [
        "no alert" if first is None else f"{first.rule} fired at step {first.fired_step}",
        "the loss did not diverge" if diverged is None else f"the loss diverged at step {diverged}",
        *([] if ahead is None else [f"lead {ahead} steps"]),
        f"final loss {loss.mean():.2f} (mean of the last {len(loss)} steps)",
    ]
    return "; ".join(parts)


# --- replay, report and rules -----------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> int:
    from rich.console import Console

    from attnwatch.monitor.predictors import first_crossings
    from attnwatch.monitor.replay import changes, replay, rules_of
    from attnwatch.monitor.rules import load_rules, of_file
    from attnwatch.monitor.sweep import parse_sweep, run_sweep
    from attnwatch.reports import replays

    given = None if options.rules is None else load_rules(options.rules)
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    runs = _open(options.runs)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    if sweep is not None:
        with _progress(runs) as look, of_file(options.rules):
            points = run_sweep(runs, lambda run: given or rules_of(run), sweep, look)
        if options.json:
            print(json.dumps(replays.sweep_as_data(points), indent=1, allow_nan=False))
        else:
            replays.show_sweep(points, sweep.metric, console)
        return 0
    findings = []
    with _progress(runs) as look, of_file(options.rules):
        for run in runs:
            replayed = replay(run, rules_of(run) if given is None else given, look)
            differing = None if given is None else changes(run.alerts, replayed.alerts)
            findings.append(replays.Finding(run, replayed, differing, first_crossings(run)))
    if options.json:
        print(json.dumps(replays.as_data(findings), indent=1, allow_nan=False))
    else:
        replays.show(findings, console)
    return 0


def _open(paths: Sequence[Path]) -> list[Run]:
    """The runs that the paths stand for; what is none is named on stderr."""
    from attnwatch.monitor.paths import listed, open_runs

    runs, others = open_runs(paths)
    if others:
        print(f"attnwatch: left out, no runs: {listed(others)}", file=sys.stderr)
    return runs


@contextmanager
def _progress(runs: Sequence[Run]) -> Iterator[Callable[[object], None]]:
    """What to call with every sample replayed: a bar on a terminal, until the end."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        bar = bars.add_task("samples", total=sum(len(run.steps) for run in runs))
        yield lambda _: bars.advance(bar)


def _report(options: argparse.Namespace) -> int:
    from attnwatch.reports.html import write_page_and_summary

    runs = _open(options.runs)
    beside = runs[0].path if len(runs) == 1 else Path()
    print(write_page_and_summary(runs, options.output or beside / "report.html"))
    return int(options.fail_on is not None and any(_fired(run, options.fail_on) for run in runs))


def _fired(run: Run, severity: str) -> bool:
    """Whether an alert of this severity or a graver one fired."""
    from attnwatch.reports.summary import fired

    return bool(fired(run, *SEVERITIES[SEVERITIES.index(severity) :]))


def _rules(options: argparse.Namespace) -> int:
    text = Path(__file__).with_name("default_rules.toml").read_text(encoding="utf-8")
    if options.out is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(options.out, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"expected a new file, found {options.out} there already; name another or remove it") from None
    except OSError as error:
        raise UsageError(
            f"expected a place to write the rules, found {str(options.out)!r} ({error.strerror}); name another file"
        ) from None
    print(options.out)
    return 0
