"""A long run in small: memory stays flat, files stay bounded, and what was recorded opens fast enough to be looked at.

`python -m benchmarks.store` is the same at full size: a million steps, ten thousand samples of 32 x 32 heads.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from benchmarks.store import KINDS, watched

from attnwatch.monitor import store
from attnwatch.monitor.journal import Journal
from attnwatch.monitor.store import RunWriter, open_run

STEPS, EVERY, LAYERS, HEADS = 3000, 20, 2, 4
RECORD = 28 + 4 * len(KINDS) * LAYERS * HEADS
"""Bytes of a sample: magic, checksum, step, time, seconds, and the numbers."""


def opened_in(folder: Path) -> Iterator[Path]:
    """Files there that this process has open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that by which they are listed
            if descriptor.readlink().is_relative_to(folder):
                yield descriptor.readlink()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """A run of 3,000 steps, its segments of 50 samples; at each third the memory held and the files that are open."""
    path = tmp_path_factory.mktemp("runs") / "long"
    patch = pytest.MonkeyPatch()
    patch.setattr(store, "SEGMENT_BYTES", 50 * RECORD)
    held, opened = [], []
    tracemalloc.start()
    with watched(path, EVERY, LAYERS, HEADS) as monitor:
        for step in range(STEPS):
            monitor.step(loss=2 + 8 / (1 + step / 100), grad_norm=1.0, lr=1e-3)
            if (step + 1) % (STEPS // 3) == 0:
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
                opened.append(len(list(opened_in(path))))
    tracemalloc.stop()
    patch.undo()
    assert (monitor.alerts, monitor.problems) == ([], [])
    return path, held, opened


def test_memory_is_flat(long_run: tuple[Path, list[int], list[int]]) -> None:
    """From the second third of the run to the third: less than ten bytes a step, what a reading of memory may vary by.

    Keeping a number of every step would take 32, a sample 1,000 at every twentieth."""
    _, (_, second, third), _ = long_run
    assert third - second < 10 * STEPS / 3


def test_a_full_segment_is_left_and_no_file_stays_open(long_run: tuple[Path, list[int], list[int]]) -> None:
    path, _, opened = long_run
    sizes = [file.stat().st_size for file in sorted((path / "samples").iterdir())]
    assert sizes == [50 * RECORD] * (STEPS // EVERY // 50)
    assert len(set(opened)) == 1


def test_problems_without_end_have_one(tmp_path: Path) -> None:
    """Each with a text of its own: a thousand, and one that says so."""
    journal = Journal(RunWriter(tmp_path / "run", {"metrics": []}), [])
    for number in range(1100):
        journal.problem("tracker", f"no answer at {number}")
    journal.close()
    recorded = open_run(tmp_path / "run").problems
    assert list(recorded) == journal.problems
    assert [problem.text for problem in recorded[:1000]] == [f"no answer at {number}" for number in range(1000)]
    assert [(problem.where, problem.text) for problem in recorded[1000:]] == [
        ("monitor", "1000 problems are named, further ones are not")
    ]


def test_nothing_is_lost(long_run: tuple[Path, list[int], list[int]]) -> None:
    path, _, _ = long_run
    run = open_run(path)
    assert run.ended
    assert run.steps.tolist() == list(range(0, STEPS, EVERY))
    assert run.scalar("loss")[0].tolist() == list(range(STEPS))
    assert run.scalar("loss")[1].tolist() == [2 + 8 / (1 + step / 100) for step in range(STEPS)]
    assert not np.isnan(run.metric("entropy")).any()
    assert [problem.text for problem in run.problems] == []
