"""What merging the ranks costs: time a sample by number of ranks, and one rank's work among 1,024. Two tables.

Gloo processes of this machine merge samples of 32 layers x 32 heads, made up: nothing is measured or trained. In turn
with each sample they send as much with nothing of ours around it: a barrier and the two all-to-alls that a sample is
made of; or, as a merge might have been written, a barrier and two all-reduces. Ours: what a sample takes beyond its own
bare collectives, the median of the differences. CPU time is of one rank, all of its threads; where processes share
cores the wall time is mostly of waiting for one. Meet: until all ranks have come; the barrier stands for it among the
bare ones. Own: this rank's arithmetic; its CPU time.

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
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from attnwatch.hooks.layers import METRICS, Layer
from attnwatch.hooks.packing import Held, held, lay_out, pack, sliced, unpack
from attnwatch.hooks.probe import Reading
from attnwatch.hooks.ranks import Given, Ranks
from attnwatch.hooks.statistics import ATTENTION

LAYERS, HEADS, WARM = 32, 32, 5


class Cost(NamedTuple):
    """Milliseconds a sample, medians: wall and CPU time of the bare collectives, of a sample, and of what is ours."""

    reduces: float
    reduces_cpu: float
    bare: float
    bare_cpu: float
    merged: float
    merged_cpu: float
    ours: float
    ours_cpu: float
    meet: float
    own: float


def reading(layers: Sequence[int], heads: int, part: tuple[int, int] = (0, 1), looked: bool = False) -> Reading:
    """Of one rank: numbers that a run might have. looked: at the weights too, which is so in every fifth sample."""
    random = np.random.default_rng(0)
    kept = tuple(
        Layer(f"layers.{n}.attention", heads, heads, 128, "bfloat16", state="verified", part=part) for n in layers
    )
    values = random.random((len(METRICS), len(kept), heads)).astype(np.float32)
    values[len(ATTENTION) :] = 1.0 if looked else np.nan  # the same weights on all ranks
    pairs = random.random((2, len(ATTENTION), len(kept), heads)) + 1.0
    return Reading(tuple(layer.name for layer in kept), kept, values, pairs, np.zeros(0), (), 0.0)


def measured(samples: int) -> Cost:
    """Of this rank among those of the default group."""
    ranks, mine = Ranks("benchmark"), reading(range(LAYERS), HEADS)
    meet, waits = ranks._meet, []

    def timed(step: int, is_wide: bool) -> bool:
        start = time.perf_counter()
        answer = meet(step, is_wide)
        waits.append(time.perf_counter() - start)
        return answer

    ranks._meet = timed  # type: ignore[method-assign]
    scalars = {"loss": 1.0, "grad_norm": 2.0}
    told = held(mine, scalars)
    share = pack(lay_out([told], [{}]), mine, scalars, [0.0] * 5)
    share = share._replace(last=share.last[:0])
    sums, tops, _ = (torch.from_numpy(numbers) for numbers in share)
    rows = torch.from_numpy(sliced(share, ranks.size)[0])
    found, group = torch.empty_like(rows), dist.new_group(backend="gloo")

    def reduces() -> None:
        dist.barrier(group)
        dist.all_reduce(sums, dist.ReduceOp.MAX, group)  # its sum would grow without end
        dist.all_reduce(tops, dist.ReduceOp.MAX, group)

    def exchanges() -> None:
        dist.barrier(group)
        for _ in range(2):
            dist.all_to_all_single(found, rows, group=group)

    spent, owns = [], []
    for step in range(samples + WARM):
        given = Given(step, mine, scalars, False, 20)
        spent.append([clocked(work) for work in (reduces, exchanges, partial(ranks.merge, given))])
        start = time.process_time()
        ranks.own(given)
        owns.append(time.process_time() - start)
    ranks.leave()
    times = np.array(spent[WARM:])  # [samples, 3, wall and CPU]
    middle = 1000 * np.median(np.concatenate([times, times[:, [2]] - times[:, [1]]], 1), 0)
    return Cost(*middle.ravel(), *(1000 * statistics.median(each[WARM:]) for each in (waits, owns)))


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall and of CPU time, once all ranks are there."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


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
        reading([int(n) for n in stage], HEADS // spread.tensor, (part, spread.tensor), looked=True)
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
        f"{sum(each.nbytes for each in share) / 1024:.0f}",
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
    console = Console(width=100)
    columns = ("2 all-reduces", "2 all-to-alls", "a sample", "ours", "of it meet", "of it own")
    table = Table("ranks", *columns, title=f"Milliseconds, wall / CPU of a rank; {os.cpu_count()} cores")
    for count in options.ranks:
        cost = [f"{each:.1f}" for each in together(count, options.samples)]
        table.add_row(str(count), *map(" / ".join, zip(cost[:8:2], cost[1:8:2], strict=True)), *cost[8:])
    console.print(table)
    titles = ("data x tensor x pipe", "pack, ms", "unpack, ms", "KiB", "with weights", "once: lay out, ms", "told, MiB")
    table = Table(*titles, title="One of 1,024 ranks")
    for spread in (Spread(1024, 1, 1), Spread(128, 8, 1), Spread(16, 8, 8)):
        table.add_row(*simulated(spread))
    console.print(table)
    console.print(f"The store answers the requests of 1,024 ranks at one sample in {requests(1024):.0f} ms")


if __name__ == "__main__":
    main()
