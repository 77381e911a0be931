"""What merging the ranks costs: time a sample by number of ranks, and one rank's work among 1,024. Two tables.

Gloo processes of this machine merge samples of 32 layers x 32 heads, made up: nothing is measured or trained. CPU time
is of one rank, all of its threads; where processes share cores the wall time is mostly of waiting for each other. Meet:
until all ranks have come. Own: this rank's arithmetic, without any communication; its CPU time.

Of 1,024 ranks one process does what each of them would: lay out what all hold, pack its share, unpack the sum. The
network's part is not simulated: only its bytes are counted.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from attnwatch.hooks.layers import METRICS, Layer
from attnwatch.hooks.packing import Held, held, lay_out, pack, unpack
from attnwatch.hooks.probe import Reading
from attnwatch.hooks.ranks import Given, Ranks
from attnwatch.hooks.statistics import ATTENTION

LAYERS, HEADS, WARM = 32, 32, 5


class Cost(NamedTuple):
    """Milliseconds a sample, medians."""

    wall: float
    meet: float
    cpu: float
    own: float


def reading(layers: Sequence[int], heads: int, part: tuple[int, int] = (0, 1)) -> Reading:
    """Of one rank: numbers that a run might have."""
    random = np.random.default_rng(0)
    kept = tuple(
        Layer(f"layers.{n}.attention", heads, heads, 128, "bfloat16", state="verified", part=part) for n in layers
    )
    values = random.random((len(METRICS), len(kept), heads)).astype(np.float32)
    values[[metric.name for metric in METRICS].index("wq_sigma_max")] = 1.0  # the same weights on all ranks
    pairs = random.random((2, len(ATTENTION), len(kept), heads)) + 1.0
    return Reading(tuple(layer.name for layer in kept), kept, values, pairs, np.zeros(0), (), 0.0)


def measured(samples: int) -> Cost:
    """Of this rank among those of the default group."""
    ranks, mine = Ranks("benchmark"), reading(range(LAYERS), HEADS)
    meet, waits = ranks._meet, []

    def timed(step: int) -> None:
        start = time.perf_counter()
        meet(step)
        waits.append(time.perf_counter() - start)

    ranks._meet = timed  # type: ignore[method-assign]
    walls, cpus, owns = [], [], []
    for step in range(samples + WARM):
        given = Given(step, mine, {"loss": 1.0, "grad_norm": 2.0}, False, 20)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        ranks.merge(given)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        start = time.process_time()
        ranks.own(given)
        owns.append(time.process_time() - start)
    ranks.leave()
    return Cost(*(1000 * statistics.median(times[WARM:]) for times in (walls, waits, cpus, owns)))


def together(count: int, samples: int) -> Cost:
    """Of rank 0 among so many processes."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", "--samples", str(samples)],
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [process.communicate(timeout=600)[0] for process in processes]
    return Cost(*map(float, said[0].split()))


class Spread(NamedTuple):
    """How a model is spread: copies x parts of the heads x stages."""

    data: int
    tensor: int
    pipeline: int


def simulated(spread: Spread) -> list[str]:
    """One row: what one of the ranks does and sends."""
    stages = np.array_split(np.arange(LAYERS), spread.pipeline)
    kinds: list[Reading] = [
        reading([int(n) for n in stage], HEADS // spread.tensor, (part, spread.tensor))
        for stage in stages
        for part in range(spread.tensor)
    ]
    ranks: list[Held] = [held(kind, ["loss"]) for _ in range(spread.data) for kind in kinds]
    notes = [{layer.name: "weights named by the call" for layer in rank.layers} for rank in ranks]
    start = time.process_time()
    layout = lay_out(ranks, notes)
    laid = time.process_time() - start
    share = pack(layout, kinds[0], {"loss": 1.0}, [0.0] * 5)
    assert unpack(layout, share).values.shape == (len(METRICS), LAYERS, HEADS)
    told = len(pickle.dumps(ranks[0])) * len(ranks)
    return [
        f"{spread.data} x {spread.tensor} x {spread.pipeline}",
        f"{median(lambda: pack(layout, kinds[0], {'loss': 1.0}, [0.0] * 5)):.2f}",
        f"{median(lambda: unpack(layout, share)):.2f}",
        f"{(share.sums.nbytes + share.tops.nbytes) / 1024:.0f}",
        f"{1000 * laid:.0f}",
        f"{told / 2**20:.1f}",
    ]


def requests(ranks: int) -> float:
    """Milliseconds that the store takes to answer so many ranks at one sample, one request after another."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("localhost", server.port, is_master=False)
    start = time.perf_counter()
    for rank in range(ranks):
        store.set(f"came/{rank}", "7")
        store.add("7/came", 1)
        store.compare_set("7/door", "", "open")
        store.get("7/door")
    return 1000 * (time.perf_counter() - start)


def median(work: Callable[[], object], times: int = 30) -> float:
    """Milliseconds of CPU time."""
    costs = []
    for _ in range(times):
        start = time.process_time()
        work()
        costs.append(time.process_time() - start)
    return 1000 * statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--rank", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    if options.rank:
        dist.init_process_group("gloo")
        print(*measured(options.samples))
        dist.destroy_process_group()
        return
    console = Console()
    table = Table("ranks", "wall, ms", "meet, ms", "CPU, ms", "own, ms", title=f"A sample, {os.cpu_count()} cores")
    for count in options.ranks:
        table.add_row(str(count), *(f"{each:.2f}" for each in together(count, options.samples)))
    console.print(table)
    titles = ("data x tensor x pipe", "pack, ms", "unpack, ms", "KiB", "once: lay out, ms", "told, MiB")
    table = Table(*titles, title="One of 1,024 ranks")
    for spread in (Spread(1024, 1, 1), Spread(128, 8, 1), Spread(16, 8, 8)):
        table.add_row(*simulated(spread))
    console.print(table)
    console.print(f"The store answers the requests of 1,024 ranks at one sample in {requests(1024):.0f} ms")


if __name__ == "__main__":
    main()
