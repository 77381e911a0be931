"""Makes the runs that are not there yet, several at once."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks.detection.recipe import Recipe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnwatch.monitor.run import Run, open_run
from attnwatch.monitor.sample import UsageError


def stored(recipe: Recipe, runs: Path) -> Run | None:
    """The finished run of exactly this recipe, if there is one."""
    try:
        run = open_run(runs / recipe.folder)
    except UsageError:
        return None
    return run if run.ended else None


def make(recipes: Sequence[Recipe], runs: Path, jobs: int, console: Console) -> None:
    """Trains what `stored` does not find. Each run has one thread and yields to other programs."""
    missing = [recipe for recipe in recipes if stored(recipe, runs) is None]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quietly) as pool,
    ):
        task = progress.add_task("training", total=len(recipes), completed=len(recipes) - len(missing))
        # Longest first, so that no worker is left alone with one at the end.
        order = sorted(missing, key=lambda r: r.steps * r.layers * r.width * r.length, reverse=True)
        running = {pool.submit(_make, recipe, runs): recipe for recipe in order}
        for done in as_completed(running):
            error = done.exception()
            if error is not None:
                console.print(f"{running[done].name}: {type(error).__name__}: {error}", markup=False)
            progress.update(task, advance=1, description=running[done].name)


def _quietly() -> None:
    os.nice(10)
    logging.disable(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)


def _make(recipe: Recipe, runs: Path) -> None:
    from benchmarks.detection.train import train

    folder = runs / recipe.folder
    shutil.rmtree(folder, ignore_errors=True)  # of one that was interrupted
    train(recipe, folder)
