"""What commands on stored runs share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from attnwatch.monitor.run import Run

MOST_NAMED = 8
"""Parts of a run that could not be read."""


def open_all(paths: Sequence[Path]) -> list[Run]:
    """The runs that the paths stand for; what is none is named on stderr."""
    from attnwatch.monitor.paths import listed, open_runs

    runs, others = open_runs(paths)
    if others:
        print(f"attnwatch: left out, no runs: {listed(others)}", file=sys.stderr)
    return runs


def tell_unreadable(run: Run) -> None:
    """On stderr, what the answer is made without: a page lists it, rows and numbers have no place for it."""
    for problem in run.unreadable[:MOST_NAMED]:
        print(f"attnwatch: {run.path.name}: {problem.where}: {problem.text}", file=sys.stderr)
    if len(run.unreadable) > MOST_NAMED:
        print(f"attnwatch: {run.path.name}: and {len(run.unreadable) - MOST_NAMED} more like these", file=sys.stderr)


def printer() -> Console:
    """For tables on stdout. A reader that has seen enough (`head`) is no failure: cli.py hears of it, not rich, which
    would exit with 1."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Printer(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


@contextmanager
def progress(runs: Sequence[Run]) -> Iterator[Callable[[object], None]]:
    """What to call with every sample replayed: a bar on a terminal, until the end."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        bar = bars.add_task("samples", total=sum(len(run.steps) for run in runs))
        yield lambda _: bars.advance(bar)
