"""All figures that have a goal, in one table: what was found, what the goal is, and whether it is met.

Each is measured by the benchmark of its name, whose own table says more. Progress goes to stderr, the table, in
Markdown, to stdout. A benchmark that fails is a row that says so, and the exit code is 1. `peers` installs packages of
other people from the package index into a directory that is gone afterwards.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks import distributed, overhead, report, rows, scan, scrape, spectrum, store
from benchmarks.detection.markdown import table as markdown
from benchmarks.peers.timing import costs
from benchmarks.peers.watchers import SAME_WORK
from rich.console import Console
from rich.table import Table

import attnwatch
from attnwatch.monitor.replay import replay, rules_of
from attnwatch.monitor.store import open_run

LOG = Console(stderr=True, highlight=False)


class Figure(NamedTuple):
    """at_least: the goal is a floor, not a ceiling."""

    what: str
    found: float
    goal: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        """False too where nothing was found: NaN."""
        return self.found >= self.goal if self.at_least else self.found <= self.goal

    def row(self) -> list[str]:
        bound = "at least" if self.at_least else "at most"
        cells = (self.what, _shown(self.found, self.unit), f"{bound} {_shown(self.goal, self.unit)}")
        return [*cells, "yes" if self.met else "**no**"]


def _shown(value: float, unit: str) -> str:
    """Ratios, which have no unit, with four decimals: goals near 1 differ in the second."""
    if not unit:
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def of_overhead(quick: bool) -> Iterator[Figure]:
    for case in overhead.QUICK if quick else overhead.FULL:
        *_, each, default = _cells(overhead.every_step, case)
        name = f"CPU time over unwatched, {case.size}, {case.batch} x {case.length} tokens"
        name += "" if case.rows == 64 else f", {case.rows or 'all'} rows"
        yield Figure(f"{name}: default cadence", float(default), 1.01)
        yield Figure(f"{name}: every step sampled", float(each), 1.10)
    for size in ("14 M",) if quick else ("14 M", "92 M"):
        (peak, before), (watched, _) = overhead.peak_memory(size, None), overhead.peak_memory(size, 1)
        share = (watched - before) / (peak - before)
        yield Figure(f"peak memory over unwatched, {size}, 1 x {overhead.LONG} tokens, every step", share, 1.02)


def of_spectrum(quick: bool) -> Iterator[Figure]:
    rounds = 5 if quick else 15
    compared = _cells(spectrum.compare, "7B", rounds, False)
    yield Figure("spectrum of a 7B-shaped layer over its two Gram products, CPU time", float(compared[4]), 2)
    *_, share = _cells(spectrum.against_training, 512, 4 if quick else 8)
    added = float(share.removesuffix(" %"))
    yield Figure("a 7B-shaped layer: default cadence over training, CPU time", added, 1, "%")


def of_rows(quick: bool) -> Iterator[Figure]:
    length = 4096
    cost = rows.compare(length, 2 if quick else 5)
    yield Figure(f"entropy of every row of {length} from the fused kernel: error", cost.error, 6e-6, "nat")
    yield Figure("the same by the kernel over all statistics by blocks, CPU time", cost.kernel / cost.blocks, 1)


def of_store(quick: bool, layers: int = 32, heads: int = 32) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as place:
        samples, _ = store.write_alone(Path(place) / "run", 500 if quick else 2000, layers, heads)
    clock, cpu = 1000 * np.median(samples, axis=1)
    what = f"writing a sample of {layers} x {heads} heads, median"
    yield Figure(f"{what}, CPU time", float(cpu), 0.1, "ms")
    yield Figure(f"{what}, by the clock", float(clock), 0.1, "ms")


def of_distributed(quick: bool) -> Iterator[Figure]:
    cost = distributed.together(8, 20 if quick else 50)
    what = "merging 8 ranks, a sample, beyond its bare collectives"
    yield Figure(f"{what}, CPU time of a rank", cost.ours_cpu, 5, "ms")
    yield Figure(f"{what}, by the clock", cost.ours, 5, "ms")


def of_report(quick: bool, samples: int = 5000, layers: int = 32, heads: int = 32) -> Iterator[Figure]:
    what = f"of {samples:,} samples of {layers} x {heads} heads"
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run"
        report.make(path, samples, layers, heads, 20, LOG)
        cost, _ = report.draw(path)
        yield Figure(f"report {what}", cost.size, 5, "MB")
        yield Figure(f"report {what}, opened and drawn, CPU time", cost.opened + cost.drawn, 5, "s")
        run = open_run(path)
        start = time.process_time()
        replay(run, rules_of(run))
        yield Figure(f"replay {what}", samples / (time.process_time() - start), 1000, "samples/s", at_least=True)


def of_scan(quick: bool) -> Iterator[Figure]:
    size, (clock, cpu, peak) = scan.measured(32, 4096)
    what = f"scan of 7B-shaped queries and keys, {size:.1f} GB"
    yield Figure(f"{what}, CPU time", cpu, 60, "s")
    yield Figure(f"{what}, by the clock", clock, 60, "s")
    yield Figure(f"{what}, peak memory", peak, 1.5, "GB")


def of_scrape(quick: bool) -> Iterator[Figure]:
    cells = scrape.row("layers", attnwatch.Prometheus(port=0, linger=0), 12 if quick else 30)
    yield Figure(f"the text of a scrape of {scrape.LAYERS} layers, CPU time", float(cells[3]), 50, "ms")
    yield Figure("all of the scrape, median, by the clock", float(cells[4]), 50, "ms")


def of_peers(quick: bool) -> Iterator[Figure]:
    """attnwatch every=1 measures more than entropy, yet from 64 query rows, the others from all: that stands apart."""
    steps = {256: 20, 1024: 5} if quick else {256: 60, 1024: 20}
    found = {name: costs(name, steps) for name in SAME_WORK}
    for index, length in enumerate(steps):
        ratios = {name: taken[index].ratio for name, taken in found.items()}
        ours = {name: ratios.pop(name) for name in list(ratios) if name.startswith("attnwatch")}
        best = min(ratios, key=lambda name: ratios[name])
        for name, ratio in ours.items():
            yield Figure(f"{name}: CPU time over unwatched, T = {length}; goal: {best}", ratio, ratios[best])


BENCHMARKS: dict[str, Callable[[bool], Iterator[Figure]]] = {
    "overhead": of_overhead, "spectrum": of_spectrum, "rows": of_rows, "store": of_store,
    "distributed": of_distributed, "report": of_report, "scan": of_scan, "scrape": of_scrape, "peers": of_peers,
}  # fmt: skip


def _cells(add: Callable[..., None], *options: Any) -> list[str]:
    """Of the row that a benchmark adds to its table."""
    table = Table()
    add(table, *options)
    return [str(next(iter(column.cells))) for column in table.columns]


def gather(benchmarks: Mapping[str, Callable[[bool], Iterable[Figure]]], quick: bool) -> tuple[list[list[str]], bool]:
    """The rows of the table, and whether every benchmark came to its end."""
    table, sound = [], True
    for number, (name, work) in enumerate(benchmarks.items(), 1):
        LOG.print(f"{time.strftime('%H:%M:%S')} {number} of {len(benchmarks)}: {name}")
        try:
            for figure in work(quick):
                table.append(figure.row())
                LOG.print(f"  {' | '.join(table[-1])}", soft_wrap=True, markup=False)
        except (Exception, SystemExit) as error:  # some end the program when they did not measure what they should
            sound = False
            table.append([name, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}", "", "**failed**"])
            LOG.print(f"  {table[-1][1]}", soft_wrap=True, markup=False)
    return table, sound


def machine() -> str:
    """Linux only."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    assert memory is not None
    return (
        f"{' '.join(model[1].split()) if model else 'unknown processor'}, {os.cpu_count()} cores, "
        f"{int(memory[1]) / 2**20:.0f} GiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and few steps: about a quarter of an hour")
    known = list(BENCHMARKS)
    parser.add_argument(
        "--only", nargs="+", choices=known, default=known, metavar="NAME", help=f"of {', '.join(known)}"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    found, sound = gather({name: BENCHMARKS[name] for name in options.only}, options.quick)
    load = f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{date.today()}, {machine()}, {load}; one thread, torch {torch.__version__}\n")
    print(markdown(("what", "found", "goal", "met"), found))
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
