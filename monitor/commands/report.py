"""`attnwatch report`: one page for one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.commands.runs import open_all
from attnwatch.monitor.sample import UsageError

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="one HTML page for one or several runs",
        description="Writes one self-contained page, also of a run that was killed or still goes on, and beside it "
        "summary.json (of -o NAME.html: NAME.summary.json). For one run both go into its directory.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory, or one that holds runs")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (several runs: ./report.html)")
    parser.add_argument(
        "--fail-on", choices=SEVERITIES, metavar="SEVERITY",
        help="exit 1 when an alert of this severity (info, warning, critical) or a graver one fired",
    )  # fmt: skip
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from attnwatch.reports.html import write_page_and_summary

    if options.output == Path("-"):
        raise UsageError("expected a file for the page, found '-'; give -o FILE: the summary goes beside it")
    runs = open_all(options.runs)
    beside = runs[0].path if len(runs) == 1 else Path()
    print(write_page_and_summary(runs, options.output or beside / "report.html"))
    return int(options.fail_on is not None and any(_fired(each, options.fail_on) for each in runs))


def _fired(run: Run, severity: str) -> bool:
    """Whether an alert of this severity or a graver one fired."""
    from attnwatch.reports.summary import fired

    return bool(fired(run, *SEVERITIES[SEVERITIES.index(severity) :]))
