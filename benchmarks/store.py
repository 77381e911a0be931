"""A long run: what recording it costs and leaves on disk, how fast it opens, and that memory stays flat. One table.

The monitor is a real one with everything behind it (rules, run directory, log, an output in a thread of its own);
only its probe is made up: it gives random numbers of healthy heads, the spectrum in every fifth sample. A step takes
0.1 ms here, so that the output may be named as slower than training. Times are CPU times of the training thread; those
of a writer alone are by the clock too. Linux only: resident memory is read from /proc.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from attnwatch.hooks.layers import METRICS, Layer
from attnwatch.hooks.probe import Reading
from attnwatch.monitor.journal import Journal
from attnwatch.monitor.options import Options, choose_rules, header
from attnwatch.monitor.outputs.apart import apart
from attnwatch.monitor.outputs.log import LogOutput
from attnwatch.monitor.rules import Engine
from attnwatch.monitor.sample import Metric, Sample, Update
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.monitor.thin import thin

SPECTRUM_EVERY = 5
KINDS = tuple(Metric(*metric) for metric in METRICS)
NAMES = tuple(metric.name for metric in KINDS)


class MadeProbe:
    """Gives numbers without a model."""

    due = False

    def __init__(self, layers: int, heads: int) -> None:
        self.names = tuple(f"model.layers.{index}.self_attn" for index in range(layers))
        self._layers = tuple(Layer(name, heads, heads, 128, state="verified") for name in self.names)
        self._random = np.random.default_rng(0)
        self._base = 0.5 + 0.2 * self._random.random((len(KINDS), layers, heads), np.float32)
        self._base[NAMES.index("nonfinite")] = 0
        self._of_weights = np.array([metric.merge == "last" for metric in KINDS])
        self._looks = True

    def arm(self, look: bool) -> None:
        self._looks = look

    def disarm(self) -> None: ...

    def close(self) -> None: ...

    def values(self) -> NDArray[np.float32]:
        """`[M, L, H]`."""
        values = self._base * (1 + 0.1 * self._random.random(self._base.shape, np.float32))
        if not self._looks:
            values[self._of_weights] = np.nan
        return values

    def finish(self, later: Sequence[Any] = ()) -> Reading:
        nothing = np.zeros(0)
        return Reading(self.names, self._layers, self.values(), pairs=nothing, extras=nothing, problems=(), seconds=0.0)


class Counts:
    """An output that only counts what it is told."""

    told = 0

    def write(self, update: Update) -> None:
        self.told += 1

    def close(self) -> None: ...


def watched(path: Path, every: int, layers: int, heads: int) -> Monitor:
    """A monitor as `watch` makes it, of a made-up model."""
    rules, source = choose_rules(None)
    options = Options(every, SPECTRUM_EVERY, 64, 4, source, None, None, None, "eager", None)
    writer = RunWriter(path, header(options, KINDS, rules, {"torch": torch.__version__}, model="Made"))
    journal = Journal(writer, [LogOutput(), apart(Counts())])
    probe: Any = MadeProbe(layers, heads)
    return Monitor(probe, journal, Engine(rules, KINDS), KINDS, options, None, report=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    table = Table("what", "median", "99 %", "largest", "whole", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        record(directory / "run", options, console, table)
        read(directory, table)
        count = min(options.samples, 2000)
        samples, lines = write_alone(directory / "alone", count, options.layers, options.heads)
        for name, spent in (("a sample", samples), ("a line of scalars", lines)):
            _add(table, f"writing {name}, ms wall", spent[0] * 1e3)
            _add(table, f"writing {name}, ms CPU", spent[1] * 1e3)
    console.print(f"{options.steps:,} steps, {options.samples:,} samples of {options.layers} x {options.heads} heads")
    console.print(table)


def record(path: Path, options: argparse.Namespace, console: Console, table: Table) -> None:
    every = options.steps // options.samples
    spent = np.ones(options.steps)  # every page of it is there before memory is looked at
    rng = np.random.default_rng(1)
    losses = 2 + 8 / (1 + np.arange(options.steps) / 1000) + 0.02 * rng.standard_normal(options.steps)
    norms = rng.random(options.steps)
    resident = []
    with watched(path, every, options.layers, options.heads) as monitor:
        for step in track(range(options.steps), "a run", console=console, disable=not console.is_terminal):
            began = time.thread_time()
            monitor.step(loss=losses[step], grad_norm=norms[step], lr=1e-3)
            spent[step] = time.thread_time() - began
            if step % max(options.steps // 10, 1) == 0:
                resident.append(_resident())
    sampled = np.zeros(options.steps, np.bool_)
    sampled[::every] = True
    _add(table, "a step with a sample, ms CPU", spent[sampled] * 1e3, f"{spent[sampled].sum():.1f} s")
    _add(table, "a step without, ms CPU", spent[~sampled] * 1e3, f"{spent[~sampled].sum():.1f} s")
    table.add_row("resident memory after a tenth of it", "", "", "", f"{resident[1] / 1e6:.0f} MB")
    table.add_row("resident memory at its end", "", "", "", f"{_resident() / 1e6:.0f} MB")
    table.add_row("alerts, problems", "", "", "", f"{len(monitor.alerts)}, {len(monitor.problems)}")
    for name in ("samples", "scalars.jsonl", "events.jsonl"):
        table.add_row(f"{name}", "", "", "", f"{_size(path / name) / 1e6:.1f} MB")


def read(directory: Path, table: Table) -> None:
    began = time.process_time()
    run = open_run(directory / "run")
    opened = time.process_time()
    run.metric("entropy_ratio")
    table.add_row("open_run, CPU", "", "", "", f"{opened - began:.1f} s")
    table.add_row("one metric of all heads, CPU", "", "", "", f"{time.process_time() - opened:.1f} s")
    began = time.process_time()
    done = thin(run, directory / "thin", every=10, around=100)
    thinned = time.process_time()
    table.add_row(f"thinned to {done.kept:,} samples, CPU", "", "", "", f"{thinned - began:.1f} s")
    table.add_row("thinned run", "", "", "", f"{_size(directory / 'thin') / 1e6:.1f} MB")
    began = time.process_time()
    open_run(directory / "thin").envelope("entropy_ratio")
    table.add_row("open_run of it and an envelope, CPU", "", "", "", f"{time.process_time() - began:.1f} s")


def write_alone(path: Path, count: int, layers: int, heads: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds `[2, count]` by the clock and of CPU, of so many samples and of so many lines of scalars."""
    probe = MadeProbe(layers, heads)
    writer = RunWriter(path, {"metrics": [asdict(metric) for metric in KINDS]})
    samples, lines = np.zeros((2, count)), np.zeros((2, count))
    for index in range(count):
        sample = Sample(index, time.time(), NAMES, probe.names, probe.values())
        for spent, write in (
            (samples, lambda: writer.sample(sample)),  # noqa: B023 (called at once)
            (lines, lambda: writer.scalars(index, {"loss": 2.0 + 1 / 3, "grad_norm": 1 / 7, "lr": 1e-3})),  # noqa: B023
        ):
            began = time.perf_counter(), time.thread_time()
            write()
            spent[:, index] = time.perf_counter() - began[0], time.thread_time() - began[1]
    writer.close()
    return samples, lines


def _add(table: Table, what: str, spent: NDArray[np.float64], whole: str = "") -> None:
    table.add_row(what, f"{np.median(spent):.3f}", f"{np.percentile(spent, 99):.3f}", f"{spent.max():.1f}", whole)


def _resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(os.path.getsize(file) for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
