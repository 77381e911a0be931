"""The command line. Exit codes: 0; 1, an alert that `--fail-on` asks for; 2, wrong use or unreadable input."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.sample import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        return code
    except (UsageError, OSError) as error:
        print(f"attnwatch: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("attnwatch: stopped; what was recorded is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnwatch",
        description="Watches the attention of a transformer while it trains. In a trainer: attnwatch.watch(model).",
    )
    parser.add_argument("--version", action="version", version=f"attnwatch {version('attnwatch')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train the same small model twice, without and with QK-norm, watched; about a minute",
        description="Trains a small attention-only transformer on the Python standard library's own source at a rate "
        "that climbs far too high: once as it is, once with query-key norm. Leaves two runs and report.html.",
    )
    demo.add_argument("--out", type=Path, metavar="DIR", help="where to (default: runs/demo-<date>-<time>)")
    demo.set_defaults(command=_demo)

    report = commands.add_parser(
        "report",
        help="one HTML page for one or several runs",
        description="Writes one self-contained page, also of a run that was killed or still goes on, and summary.json "
        "beside it. For one run both go into its directory.",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (several runs: ./report.html)")
    report.add_argument(
        "--fail-on", choices=SEVERITIES, metavar="SEVERITY",
        help="exit 1 when an alert of this severity (info, warning, critical) or a graver one fired",
    )  # fmt: skip
    report.set_defaults(command=_report)

    rules = commands.add_parser(
        "rules",
        help="the default rules as TOML, to edit",
        description="Prints the default rules; edit a copy and pass it as attnwatch.watch(model, rules=FILE).",
    )
    rules.add_argument("--out", type=Path, metavar="FILE", help="write to a new file instead")
    rules.set_defaults(command=_rules)
    return parser


def _demo(options: argparse.Namespace) -> int:
    out: Path = options.out or Path("runs") / datetime.now().strftime("demo-%Y%m%d-%H%M%S")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    from attnwatch.monitor import demo  # loads torch, seconds on a cold disk

    demo.one_thread()
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
    )
    started = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        logging.getLogger("attnwatch").addHandler(_Told(progress.console))
        for variant in demo.VARIANTS:
            task = progress.add_task(variant, total=demo.STEPS, loss=float("nan"))
            if not console.is_terminal:
                print(f"{variant}: {demo.STEPS} steps ...", flush=True)

            def told(step: int, loss: float, task: int = task) -> None:
                progress.update(task, completed=step + 1, loss=loss)  # type: ignore[arg-type]

            demo.train(variant, out / variant, told)
    page = _write([out / variant for variant in demo.VARIANTS], out / "report.html")
    from attnwatch.monitor.store import open_run
    from attnwatch.reports.summary import verdict

    for variant in demo.VARIANTS:
        console.print(f"{variant:9}", verdict(open_run(out / variant))[1], soft_wrap=True, highlight=False)
    console.print(f"{time.monotonic() - started:.0f} s; the report on both: {page}", soft_wrap=True, highlight=False)
    return 0


class _Told(logging.Handler):
    """Alert lines of the demo, above its progress bars."""

    def __init__(self, console: object) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("attnwatch: ")
        self._console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)  # type: ignore[attr-defined]


def _report(options: argparse.Namespace) -> int:
    runs: list[Path] = options.runs
    single = len(runs) == 1 and runs[0].is_dir()
    output: Path = options.output or (runs[0] / "report.html" if single else Path("report.html"))
    page = _write(runs, output)
    print(page)
    return int(options.fail_on is not None and _fired(runs, options.fail_on))


def _write(paths: Sequence[Path], output: Path) -> Path:
    from attnwatch.monitor.store import open_run
    from attnwatch.reports.html import write_report
    from attnwatch.reports.summary import summarize

    runs = [open_run(path) for path in paths]
    page = write_report(runs, output)
    summaries = [summarize(run) for run in runs]
    text = json.dumps(summaries[0] if len(runs) == 1 else summaries, indent=1, allow_nan=False)
    page.with_name("summary.json").write_text(text + "\n", encoding="utf-8")
    return page


def _fired(paths: Sequence[Path], severity: str) -> bool:
    from attnwatch.monitor.store import open_run

    graver = SEVERITIES[SEVERITIES.index(severity) :]
    return any(
        alert.fired_step is not None and alert.severity in graver for path in paths for alert in open_run(path).alerts
    )


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
    print(options.out)
    return 0
