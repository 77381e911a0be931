"""Command line of the crash benchmark."""

from __future__ import annotations

import argparse
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.detection import __doc__ as ABOUT
from benchmarks.detection import sampling
from benchmarks.detection.held_out import HELD_OUT
from benchmarks.detection.recipes import RECIPES
from benchmarks.detection.run import make
from benchmarks.detection.study import known, with_references
from benchmarks.detection.table import pages
from rich.console import Console

from attnwatch.monitor.rules import load_rules


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.detection", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--runs", type=Path, default=Path("runs/detection"), help="where the runs are kept")
    parser.add_argument(
        "--only", default="*", metavar="GLOB", help="recipes by name, such as 'norm_*'; with their references"
    )
    parser.add_argument("--jobs", type=int, default=2, help="run: so many at once")
    parser.add_argument("--rules", type=Path, help="table: a file of rules instead of the default ones")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("docs/detection.md"),
        help="table: the page to write, FILE-runs.md beside it",
    )
    options = parser.parse_args()
    chosen, sampled = (
        [r for r in some if fnmatch(r.name, options.only)] for some in ((*RECIPES, *HELD_OUT), sampling.SAMPLED)
    )
    console = Console(stderr=True)
    if options.command == "run":
        make([*with_references(chosen), *sampled], options.runs, options.jobs, console)
    else:
        runs = known(chosen, options.runs)
        figures, every = pages(runs, sampling.groups(options.runs), load_rules(options.rules))
        options.out.write_text(figures, encoding="utf-8")
        options.out.with_stem(f"{options.out.stem}-runs").write_text(every, encoding="utf-8")
        console.print(f"{options.out}: {len(runs)} of {len(chosen)} runs")


if __name__ == "__main__":
    main()
