"""What a scan of a large checkpoint costs: `python -m benchmarks.scan` prints seconds and peak memory.

Makes a checkpoint of query and key weights in the shape of a 7B model (32 layers, 4096 wide, 32 heads, float16: 2 GiB)
in a temporary directory, scans it as a user does, in a process of its own, and compares with the plain way: the
singular values of each head's 4096 x 4096 product, of which one is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

HEADS = 32

SCAN = """
import sys, time
from attnwatch.monitor.cli import main
code = main()
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time(), peak, file=sys.stderr)
sys.exit(code)
"""
"""Memory as the process itself sees it: that of a child as its parent sees it begins with the parent's own."""


def make(path: Path, layers: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"model.layers.{layer}.self_attn.{side}_proj.weight": (
            torch.randn(width, width, generator=generator) * width**-0.5
        ).half()
        for layer in range(layers)
        for side in "qk"
    }
    save_file(weights, path)


def scan(path: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and peak resident memory in GB, of `attnwatch scan` without a config.json."""
    command = [sys.executable, "-c", SCAN, "scan", str(path), "--heads", str(HEADS)]
    started = time.perf_counter()
    run = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - started
    cpu, peak = run.stderr.split()[-2:]
    return seconds, float(cpu), int(peak) * 1024 / 1e9


def measured(layers: int, width: int) -> tuple[float, tuple[float, float, float]]:
    """GB of a checkpoint of such layers, and what `scan` says of it."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.safetensors"
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(path, layers, width))
        maker.start()
        maker.join()
        return path.stat().st_size / 1e9, scan(path)


def plain(width: int) -> float:
    """CPU seconds of the singular values of one head's product."""
    w_q, w_k = (torch.randn(width // HEADS, width) for _ in range(2))
    started = time.process_time()
    torch.linalg.svdvals(w_q.t() @ w_k)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    size, (seconds, cpu, peak) = measured(options.layers, options.width)
    one = plain(options.width)
    table = Table(
        title=f"attnwatch scan: {options.layers} layers, {options.width} wide, {HEADS} heads, float16, {size:.1f} GB; "
        f"{os.cpu_count()} cores, torch {torch.__version__}"
    )
    for column in ("way", "seconds", "CPU seconds", "peak memory (GB)"):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_row("attnwatch scan", f"{seconds:.0f}", f"{cpu:.0f}", f"{peak:.2f}")
    whole = one * HEADS * options.layers
    table.add_row("svdvals of every product (one timed)", "", f"{whole:,.0f} ({whole / cpu:,.0f} times)", "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
