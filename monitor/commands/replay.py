"""`attnwatch replay`: rules over stored runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attnwatch.monitor.commands.runs import open_all, printer, progress, tell_unreadable


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="rules over stored runs: what would have fired when, and how many steps before the loss",
        description="Asks rules of stored runs as they were asked live. Without --rules each run is asked its own. "
        "Leads are steps from a warning that still stood to the step at which the loss began to diverge.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory, or one that holds runs")
    parser.add_argument("--rules", type=Path, metavar="FILE", help="other rules; shows how they differ from the run")
    parser.add_argument(
        "--sweep", metavar="METRIC=a:b:n",
        help="replay with n numbers from a to b in place of those that the rules compare METRIC with",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from attnwatch.monitor.replay import changes, replay, rules_of
    from attnwatch.monitor.rules import load_rules, of_file
    from attnwatch.monitor.sweep import parse_sweep, run_sweep
    from attnwatch.reports import replays
    from attnwatch.reports.crossings import crossings

    given = None if options.rules is None else load_rules(options.rules)
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    runs = open_all(options.runs)
    for each in runs:
        tell_unreadable(each)
    console = printer()
    if sweep is not None:
        with progress(runs) as look, of_file(options.rules):
            points = run_sweep(runs, lambda each: given or rules_of(each), sweep, look)
        if options.json:
            print(json.dumps(replays.sweep_as_data(points), indent=1, allow_nan=False))
        else:
            replays.show_sweep(points, sweep.metric, console)
        return 0
    findings = []
    with progress(runs) as look, of_file(options.rules):
        for each in runs:
            replayed = replay(each, rules_of(each) if given is None else given, look)
            differing = None if given is None else changes(each.alerts, replayed.alerts)
            findings.append(replays.Finding(each, replayed, differing, crossings(each)))
    if options.json:
        print(json.dumps(replays.as_data(findings), indent=1, allow_nan=False))
    else:
        replays.show(findings, console)
    return 0
