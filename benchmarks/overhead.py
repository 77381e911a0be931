"""What watching costs: CPU time and peak memory of training a small decoder, watched over unwatched. One table.

Pairs of steps are interleaved: one of a model alone, one of its watched twin. CPU time of one thread, so that other
programs on the machine disturb both sides alike and no waiting thread is counted as work.
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

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import attnwatch

LAYERS, WIDTH, HEADS, VOCABULARY = 6, 384, 6, 4096
LENGTH, BATCH = 512, 4
LONG = 4096  # positions of the one sequence in the measurement of memory
SPECTRUM_EVERY = 5  # samples: the default, and so the number of samples after which cost repeats itself


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self, length: int):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [B, T + 1] -> mean loss
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def training(length: int, batch: int, every: int | None) -> Iterator[Callable[[], float]]:
    """A step of training, which returns its CPU seconds. every: cadence of the samples; None is unwatched."""
    torch.manual_seed(0)
    model = Decoder(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with tempfile.TemporaryDirectory() as place:
        monitor = None
        if every is not None:
            monitor = attnwatch.watch(model, run=Path(place) / "run", every=every, report=False)
        order = torch.Generator().manual_seed(1)

        def step() -> float:
            tokens = torch.randint(0, VOCABULARY, (batch, length + 1), generator=order)
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


def time_ratios(every: int, rounds: int, size: int) -> tuple[list[float], float]:
    """Watched over unwatched CPU time of each round of `size` pairs of steps, and of all rounds together."""
    pairs: list[tuple[float, float]] = []
    with training(LENGTH, BATCH, None) as alone, training(LENGTH, BATCH, every) as watched:
        alone()  # the first step of a process pays for its memory and kernels
        for number in track(range(rounds * size), f"every={every}", console=Console(stderr=True)):
            order = (alone, watched) if number % 2 else (watched, alone)
            seconds = {step: step() for step in order}
            pairs.append((seconds[watched], seconds[alone]))
    by_round = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    return [_ratio(some) for some in by_round], _ratio(pairs)


def _ratio(pairs: list[tuple[float, float]]) -> float:
    return sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)


def peak_memory(every: int | None) -> tuple[float, float]:
    """MiB in a process of its own: the peak of training, and what was resident before the first step."""
    command = [sys.executable, __file__, "--memory-of", str(every or 0)]
    # Freed tensors go back to the system at once: the peak is that of living ones, and the same in every run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    peak, before = map(float, run.stdout.split())
    return peak, before


def print_memory(every: int | None) -> None:
    with training(LONG, 1, every) as step:
        before = _status("VmRSS")
        for _ in range(3):
            step()
        print(_status("VmHWM"), before)


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps: a look, not a measurement")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of is not None:
        print_memory(options.memory_of or None)
        return

    table = Table(title=f"{LAYERS} layers, width {WIDTH}, SDPA, AdamW, float32, one thread, torch {torch.__version__}")
    for column in ("watching", "of", "ratio", "quartiles", "goal"):
        table.add_column(column, justify="left" if column == "watching" else "right")
    # A round of the default cadence holds one sample, one of every=1 holds one look at the weights.
    for every, goal, count, size in ((20, 1.01, SPECTRUM_EVERY, 20), (1, 1.10, 8, SPECTRUM_EVERY)):
        ratios, whole = time_ratios(every, 2 if options.quick else count, size)
        quartiles = " ".join(f"{value:.3f}" for value in statistics.quantiles(ratios, n=4, method="inclusive"))
        what = f"CPU time, {BATCH} x {LENGTH}, {len(ratios)} rounds of {size} pairs"
        table.add_row(f"every={every}", what, f"{whole:.3f}", quartiles, f"{goal:.2f}")
    (peak, before), (watched, _) = peak_memory(None), peak_memory(1)
    what = f"peak memory, 1 x {LONG}: {peak - before:.0f} MiB of training, {watched - peak:+.0f} watched"
    table.add_row("every=1", what, f"{(watched - before) / (peak - before):.3f}", "", "1.05")
    Console().print(table)


if __name__ == "__main__":
    main()
