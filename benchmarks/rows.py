"""What it costs to measure every row of a long sequence: all statistics block by block, or entropy and first-key mass
from one more call of the fused kernel. One table, CPU time of one thread, the ways in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.normalisers import every_row
from attnwatch.hooks.statistics import ATTENTION, finish, measure, sample_rows

HEADS, D = 4, 64
ENTROPY = [s.name for s in ATTENTION].index("entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 4096 positions, fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"CPU milliseconds of one causal sequence, {HEADS} heads of {D}, torch {torch.__version__}")
    for column in ("T", "fused forward", "64 rows", "kernel, every row", "blocks, every row", "entropy differs by"):
        table.add_column(column, justify="right")
    for length in (1024, 4096) if options.quick else (1024, 2048, 4096, 8192):
        q, k = torch.randn(2, 1, HEADS, length, D, generator=torch.Generator().manual_seed(0))
        attention, some = Attention(q, k, causal=True), sample_rows(length, 64, 0.5)
        pair = measure(attention, [0], some)
        ways = (
            lambda q=q, k=k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
            lambda a=attention, some=some: measure(a, [0], some),
            lambda a=attention, pair=pair: every_row(a, [0], pair),
            lambda a=attention, n=length: measure(a, [0], range(n)),
        )
        taken = [[] for _ in ways]
        for _ in range(2 if options.quick else 5):
            for way, times in zip(ways, taken, strict=True):
                start = time.process_time()
                found = way()
                times.append(time.process_time() - start)
        error = (finish(found) - finish(every_row(attention, [0], pair)))[ENTROPY].abs().max()
        row = [f"{1e3 * statistics.median(times):.1f}" for times in taken]
        table.add_row(str(length), *row, f"{float(error):.0e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
