"""What watching costs: CPU time and peak memory of training decoders, watched over unwatched. Two tables.

Pairs of steps are interleaved: one of a model alone, one of its watched twin. CPU time of one thread, so that other
programs on the machine disturb both sides alike and no waiting thread is counted as work. The first step of each is
left out: it pays, once a run, for the optimizer's state and for the search of the projections behind q and k.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import attnwatch

VOCABULARY = 4096
EVERY, SPECTRUM_EVERY = 20, 5  # the defaults: a sample every 20 steps, of which every fifth looks at the weights
ROUND = 4 * SPECTRUM_EVERY  # samples after which cost repeats itself: every fourth look takes whole layers and updates


class Size(NamedTuple):
    layers: int
    width: int
    heads: int


SIZES = {"2 M": Size(4, 128, 4), "14 M": Size(6, 384, 6), "92 M": Size(12, 768, 12), "311 M": Size(24, 1024, 16)}


class Case(NamedTuple):
    """rounds: of ROUND pairs."""

    size: str
    length: int
    batch: int = 1
    rows: int | None = 64
    rounds: int = 1


QUICK = (Case("14 M", 256, 4), Case("92 M", 256))
FULL = (
    Case("14 M", 256, 4, rounds=2), Case("14 M", 512, 4, rounds=2), Case("14 M", 2048), Case("14 M", 8192),
    Case("14 M", 512, 4, rows=16), Case("14 M", 512, 4, rows=256), Case("14 M", 512, 4, rows=None),
    Case("92 M", 512), Case("92 M", 2048), Case("311 M", 512), Case("2 M", 128, 4, rounds=4),
)  # fmt: skip
LONG = 4096  # positions of the one sequence in the measurement of memory


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self, size: Size, length: int):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, size.width), nn.Embedding(length, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [B, T + 1] -> mean loss
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def training(case: Case, every: int | None) -> Iterator[Callable[[], float]]:
    """A step of training, which returns its CPU seconds. every: cadence of the samples; None is unwatched."""
    torch.manual_seed(0)
    model = Decoder(SIZES[case.size], case.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with tempfile.TemporaryDirectory() as place:
        monitor = None
        if every is not None:
            monitor = attnwatch.watch(model, run=Path(place) / "run", every=every, rows=case.rows, report=False)
        order = torch.Generator().manual_seed(1)

        def step() -> float:
            tokens = torch.randint(0, VOCABULARY, (case.batch, case.length + 1), generator=order)
            start = time.process_time()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(loss=loss)
            return time.process_time() - start

        yield step
        if monitor is not None:
            states = {layer.state for layer in monitor.coverage}
            if states != {"verified"} or monitor.problems:
                raise SystemExit(f"not the measurement it should be:\n{monitor}")
            monitor.close()


def pairs(case: Case, every: int, count: int) -> list[tuple[float, float]]:
    """CPU seconds of steps watched and alone."""
    taken = []
    with training(case, None) as alone, training(case, every) as watched:
        alone()
        watched()
        for number in track(range(count), f"{case.size}, {case.length}", console=Console(stderr=True)):
            order = (alone, watched) if number % 2 else (watched, alone)
            seconds = {step: step() for step in order}
            taken.append((seconds[watched], seconds[alone]))
    return taken


def ratio(some: list[tuple[float, float]]) -> float:
    return sum(pair[0] for pair in some) / sum(pair[1] for pair in some)


def every_step(table: Table, case: Case) -> None:
    """One row: every step is sampled. What the default cadence costs is reckoned from it, which is finer than measuring
    twenty times as many steps of which most are not sampled."""
    taken = pairs(case, 1, ROUND * case.rounds)
    step = statistics.median(alone for _, alone in taken)
    added = [watched - alone for watched, alone in taken]
    looks = slice(SPECTRUM_EVERY - 1, None, SPECTRUM_EVERY)  # step 0, which looked, is not among them
    look = statistics.mean(added[looks])
    del added[looks]
    sample = statistics.median(added)
    share = ((SPECTRUM_EVERY - 1) * sample + look) / SPECTRUM_EVERY / step
    row = [
        case.size, f"{case.batch} x {case.length}", str(case.rows or "all"), f"{1e3 * step:.0f}",
        f"{1e3 * sample:+.1f}", f"{1e3 * look:+.1f}", f"{1 + share:.3f}", f"{1 + share / EVERY:.4f}",
    ]  # fmt: skip
    table.add_row(*row)
    print("  ".join(row), file=sys.stderr)  # hours may pass until the table is whole


def default_cadence(rounds: int) -> str:
    """The default cadence measured, in rounds of one sample each: its ratio and the quartiles of the rounds."""
    taken = pairs(Case("14 M", 512, 4), EVERY, rounds * EVERY)
    ratios = [ratio(taken[at : at + EVERY]) for at in range(0, len(taken), EVERY)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{ratio(taken):.3f} (quartiles of {rounds} rounds: {low:.3f} {middle:.3f} {high:.3f}); goal 1.01"


def peak_memory(size: str, every: int | None) -> tuple[float, float]:
    """MiB in a process of its own: the peak of training, and what was resident before the first step."""
    command = [sys.executable, __file__, "--memory-of", size, str(every or 0)]
    # Freed tensors go back to the system at once: the peak is that of living ones, and the same in every run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    peak, before = map(float, run.stdout.split())
    return peak, before


def print_memory(size: str, every: int | None) -> None:
    with training(Case(size, LONG), every) as step:
        before = _status("VmRSS")
        for _ in range(3):
            step()
        print(_status("VmHWM"), before)


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and few steps: a look, not a measurement")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of is not None:
        print_memory(options.memory_of[0], int(options.memory_of[1]) or None)
        return

    console = Console(width=110)
    table = Table(title=f"CPU milliseconds, one thread; SDPA, AdamW, float32, torch {torch.__version__}")
    for column in ("model", "B x T", "rows", "step", "sample", "look", "every=1", f"every={EVERY}"):
        table.add_column(column, justify="right")
    for case in QUICK if options.quick else FULL:
        every_step(table, case)
    console.print(table)
    if not options.quick:
        console.print(f"every={EVERY} measured, 14 M, 4 x 512: {default_cadence(rounds=10)}")

    table = Table(title=f"Peak memory in MiB, 1 x {LONG}, every step sampled; goal 1.02")
    for column in ("model", "training alone", "watching adds", "ratio"):
        table.add_column(column, justify="right")
    for size in ("14 M",) if options.quick else ("14 M", "92 M"):
        (peak, before), (watched, _) = peak_memory(size, None), peak_memory(size, 1)
        ratio_of = (watched - before) / (peak - before)
        table.add_row(size, f"{peak - before:.0f}", f"{watched - peak:+.0f}", f"{ratio_of:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
