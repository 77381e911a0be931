"""What it costs to measure every row of a long sequence: all statistics block by block, or entropy and first-key mass
from one more call of the fused kernel. One table, CPU time of one thread, the ways in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.normalisers import every_row
from attnwatch.hooks.statistics import ATTENTION, finish, measure, sample_rows

HEADS, D = 4, 64
ENTROPY = [s.name for s in ATTENTION].index("entropy")


class Cost(NamedTuple):
    """Median CPU seconds: a forward of the fused kernel; all statistics from 64 rows; entropy and first-key mass from
    every row, by one more call of the kernel; all statistics from every row, by blocks. error: of the entropy.
    """

    fused: float
    some: float
    kernel: float
    blocks: float
    error: float


def compare(length: int, rounds: int) -> Cost:
    q, k = torch.randn(2, 1, HEADS, length, D, generator=torch.Generator().manual_seed(0))
    attention, some = Attention(q, k, causal=True), sample_rows(length, 64, 0.5)
    pair = measure(attention, [0], some)
    ways = (
        lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        lambda: measure(attention, [0], some),
        lambda: every_row(attention, [0], pair),
        lambda: measure(attention, [0], list(range(length))),
    )
    taken: list[list[float]] = [[] for _ in ways]
    found: Any = None  # of the last one
    for _ in range(rounds):
        for way, times in zip(ways, taken, strict=True):
            start = time.process_time()
            found = way()
            times.append(time.process_time() - start)
    error = (finish(found) - finish(every_row(attention, [0], pair)))[ENTROPY].abs().max()
    fused, some_rows, kernel, blocks = map(statistics.median, taken)
    return Cost(fused, some_rows, kernel, blocks, float(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 4096 positions, fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"CPU milliseconds of one causal sequence, {HEADS} heads of {D}, torch {torch.__version__}")
    for column in ("T", "fused forward", "64 rows", "kernel, every row", "blocks, every row", "entropy differs by"):
        table.add_column(column, justify="right")
    for length in (1024, 4096) if options.quick else (1024, 2048, 4096, 8192):
        *times, error = compare(length, 2 if options.quick else 5)
        table.add_row(str(length), *(f"{1e3 * seconds:.1f}" for seconds in times), f"{error:.0e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
