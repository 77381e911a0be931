"""The size of a report and what making it costs: 5,000 samples of 32 layers of 32 heads, every metric. One table.

The run is made up (noise about a trend, which neither thins nor compresses well) and written by the real writer, about
0.7 GB; reading and drawing it are counted as the CPU time of one process, reading the files themselves included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from attnwatch.hooks.layers import METRICS
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import load_rules
from attnwatch.monitor.sample import Coverage, Metric, Sample
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.reports.html import render

SPECTRUM_EVERY = 5  # samples: the default of `watch`


class Cost(NamedTuple):
    """CPU seconds of reading the files and of drawing the page, and its size in MB."""

    opened: float
    drawn: float
    size: float


def draw(path: Path, count: int = 1) -> tuple[Cost, str]:
    """The page of a run, so many times on it, and what it cost."""
    began = time.process_time()
    runs = [open_run(path) for _ in range(count)]
    opened = time.process_time()
    page = render(runs)
    return Cost(opened - began, time.process_time() - opened, len(page.encode()) / 1e6), page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--every", type=int, default=20, help="steps a sample; every step has a loss (default: 20)")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 3], help="runs on one page (default: 1, and 3)")
    parser.add_argument("-o", "--output", type=Path, help="keep the last page")
    options = parser.parse_args()
    console = Console(highlight=False)
    table = Table("runs", "samples", "layers x heads", "opened, CPU s", "drawn, CPU s", "page, MB", box=None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        make(path, options.samples, options.layers, options.heads, options.every, console)
        for count in options.runs:
            cost, page = draw(path, count)
            table.add_row(
                str(count),
                f"{options.samples:,}",
                f"{options.layers} x {options.heads}",
                f"{cost.opened:.1f}",
                f"{cost.drawn:.1f}",
                f"{cost.size:.2f}",
            )
    console.print(table)
    if options.output:
        options.output.write_text(page, encoding="utf-8")


def make(path: Path, samples: int, layers: int, heads: int, every: int, console: Console) -> None:
    """A run in which every metric of every head wanders, and collapse is alerted in the middle."""
    metrics = [Metric(*metric) for metric in METRICS]
    names = tuple(metric.name for metric in metrics)
    places = tuple(f"model.layers.{index}.self_attn" for index in range(layers))
    rules = [asdict(rule) for rule in load_rules()]
    header = {"attnwatch": "made up", "model": "Made", "metrics": [asdict(m) for m in metrics], "rules": rules}
    writer = RunWriter(path, header | {"options": {"every": every}})
    coverage = [asdict(Coverage(place, "verified", heads, heads, 128)) for place in places]
    writer.event({"event": "coverage", "step": 0, "layers": coverage})
    random = np.random.default_rng(0)
    base = random.random((len(metrics), layers, heads), dtype=np.float32)
    sparse = np.array([metric.merge == "last" for metric in metrics])
    for index in track(range(samples), "a run", console=console, disable=not console.is_terminal, transient=True):
        values = base + random.random(base.shape, dtype=np.float32) * (1 + index / samples)
        if index % SPECTRUM_EVERY:
            values[sparse] = np.nan
        writer.sample(Sample(index * every, 1.8e9 + index, names, places, values, 0.05))
        for step in range(index * every, (index + 1) * every):
            writer.scalars(step, {"loss": 2 + random.random(), "grad_norm": random.random(), "lr": 1e-3})
    middle = samples * every // 2
    worst = tuple((places[-1 - head // 4], head) for head in range(8))
    alert = Alert(
        "sparse_low_rank", "critical", "firing", "model", middle, middle + every, None, 0.3, worst,
        {"entropy_ratio": 0.1, "qk_rank_ratio": 0.2, "spread_ratio": 5.0}, "summary", "advice",
    )  # fmt: skip
    writer.event({"event": "alert", "step": middle, **asdict(alert)})
    writer.event({"event": "end", "step": samples * every, "time": 0.0, "samples": samples, "seconds": 1.0})
    writer.close()


if __name__ == "__main__":
    main()
