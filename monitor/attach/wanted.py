"""What `attnwatch run` and `attnwatch attach` are asked for; the names are those of `attnwatch.watch`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from attnwatch.monitor.options import absolute, choose_rules, run_directory
from attnwatch.monitor.outputs.prometheus import prometheus_settings
from attnwatch.monitor.sample import UsageError


@dataclass(frozen=True)
class Wanted:
    """Plain data, for JSON. run: absolute. prometheus: of the first model; another one gets the next port.
    model: which of those that were found, by its number; None: all that hold attention."""

    run: str
    every: int
    rules: str | None
    prometheus: int | None
    compiled: str = "eager"
    model: int | None = None

    def directory(self) -> Path:
        """`run`, or if that is taken the next free one of run-2, run-3, ..."""
        run = Path(self.run)
        paths = chain([run], (run.with_name(f"{run.name}-{n}") for n in count(2)))
        return next(path for path in paths if not path.exists() or (path.is_dir() and not any(path.iterdir())))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(  # torchrun takes --run for one of its own, wherever it stands
        "-o", "--run", metavar="DIR", help="where to record (runs/<date>-<time>); DIR-2, ... if it is taken"
    )
    parser.add_argument("--every", type=int, default=20, metavar="N", help="sample every N-th step (20)")
    parser.add_argument("--rules", type=Path, metavar="FILE", help="other rules than the default ones")
    parser.add_argument(
        "--compiled", choices=("eager", "graph"), default="eager", help="how to see into torch.compile (eager)"
    )
    parser.add_argument("--prometheus", type=int, metavar="PORT", help="serve metrics on 127.0.0.1")


def wanted(options: argparse.Namespace) -> Wanted:
    """Raises UsageError, before anything is started, for what `watch` would refuse."""
    if options.every < 1:
        raise UsageError(f"expected --every to be at least 1, found {options.every}")
    choose_rules(options.rules)
    prometheus_settings(options.prometheus)
    rules = None if options.rules is None else str(absolute(options.rules))
    model: int | None = getattr(options, "model", None)
    run = run_directory(options.run)
    _check_place(run)
    return Wanted(str(run), options.every, rules, options.prometheus, options.compiled, model)


def _check_place(run: Path) -> None:
    """A script that trains for days is not to find at its first step that it cannot be recorded."""
    there = next(path for path in run.parents if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        found = "which may not be written" if there.is_dir() else "which is no directory"
        raise UsageError(f"expected a place for {run}, found {there}, {found}; pass another --run")
