"""What being scraped costs: the time of a scrape, the longest stall of a training step, memory over a soak. One table.

Another process scrapes once a second, compressed, as Prometheus does, while this one trains a small model in steps of a
few milliseconds. A step's stall is its time over that of the median step. Of each scrape the longest stall that it met
counts: the median and the worst of them; beside it the worst of steps that met none, because other programs stall steps
too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import attnwatch
from attnwatch.hooks.layers import METRICS
from attnwatch.monitor.outputs.exposition import Exposition
from attnwatch.monitor.outputs.prometheus import PrometheusOutput
from attnwatch.monitor.sample import Coverage, Metric, Sample, Update

LAYERS, HEADS = 80, 32
ALL = tuple(Metric(*metric) for metric in METRICS)


class Scrape(NamedTuple):
    """start, end: seconds of the monotonic clock, which all processes share. size: bytes as they came."""

    start: float
    end: float
    size: int


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + 0.1 * self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def trainer(layers: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model of so many layers, and its training step, which returns the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(4 * HEADS) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(2, 2, 16, 4 * HEADS)

    def step() -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def scrape_each_second(port: int, pipe: Connection) -> None:
    """Until anything comes through the pipe; then what was scraped goes back. Runs in a process of its own."""
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"})
    scrapes = []
    pipe.send(None)  # ready: what follows is not the start of a process
    while not pipe.poll(1):
        start = time.monotonic()
        with urlopen(request, timeout=10) as answer:
            size = len(answer.read())
        scrapes.append(Scrape(start, time.monotonic(), size))
    pipe.send(scrapes)


@contextmanager
def scraped(port: int) -> Iterator[list[Scrape]]:
    """Scrapes go on inside; the list is filled at the end."""
    ours, its = multiprocessing.Pipe()
    scraper = multiprocessing.get_context("spawn").Process(target=scrape_each_second, args=(port, its))
    scraper.start()
    ours.recv()
    scrapes: list[Scrape] = []
    yield scrapes
    ours.send(None)
    scrapes += ours.recv()
    scraper.join()


def newest() -> Update:
    """80 layers of 32 heads with every metric there is."""
    metrics = tuple(metric.name for metric in ALL)
    layers = tuple(f"model.layers.{i}.self_attn" for i in range(LAYERS))
    values = np.random.default_rng(0).random((len(metrics), LAYERS, HEADS)).astype(np.float32)
    coverage = tuple(Coverage(layer, "verified") for layer in layers)
    return Update(0, Sample(0, 0.0, metrics, layers, values), True, {"loss": 1.0}, (), (), coverage, (), 1, 0.1)


def row(name: str, settings: attnwatch.Prometheus, seconds: float) -> list[str]:
    """The cells: series, kB; ms of CPU for the text, of scrapes, of the longest stall by scrape and of one without."""
    _, step = trainer(layers=2)
    steps = []
    with closing(PrometheusOutput(ALL, settings)) as output:
        output.write(newest())
        with urlopen(f"http://127.0.0.1:{output.port}/metrics") as answer:
            series = sum(not line.startswith(b"#") for line in answer)
        with scraped(output.port) as scrapes:
            until = time.monotonic() + seconds
            while (start := time.monotonic()) < until:
                step()
                steps.append((start, time.monotonic()))
    took = [1e3 * (scrape.end - scrape.start) for scrape in scrapes]
    steps = [each for each in steps if scrapes[0].start < each[0] and each[1] < scrapes[-1].end]
    median = statistics.median(end - start for start, end in steps)
    stalls = [(start, end, 1e3 * (end - start - median)) for start, end in steps]
    met = [max(stall for start, end, stall in stalls if s.start < end and start < s.end) for s in scrapes[1:-1]]
    others = [stall for start, end, stall in stalls if not any(s.start < end and start < s.end for s in scrapes)]
    size = statistics.median(scrape.size for scrape in scrapes) / 1e3
    times = [cpu_of_text(settings), statistics.median(took), statistics.quantiles(took, n=20)[-1]]
    times += [statistics.median(met), max(met), max(others)]
    return [name, f"{series:,}", f"{size:.0f}", *(f"{number:.0f}" for number in times)]


def cpu_of_text(settings: attnwatch.Prometheus) -> float:
    """Milliseconds of this thread, all under the GIL: the least of 20, whatever else the machine does."""
    exposition = Exposition(ALL, settings.heads)
    exposition.write(newest())
    took = []
    for _ in range(20):
        start = time.thread_time()
        "".join(exposition.text())
        took.append(time.thread_time() - start)
    return 1e3 * min(took)


def soak(seconds: float, console: Console) -> None:
    """Trains a watched model of 80 layers, scraped each second; says whether memory grows."""
    model, step = trainer(LAYERS)
    seen = []
    with tempfile.TemporaryDirectory() as place:
        settings = attnwatch.Prometheus(port=0, linger=0)
        run = Path(place) / "run"
        with attnwatch.watch(model, run=run, every=5, rows=16, report=False, prometheus=settings) as monitor:
            assert monitor.metrics_port is not None
            with scraped(monitor.metrics_port) as scrapes:
                start = time.monotonic()
                while (passed := time.monotonic() - start) < seconds:
                    monitor.step(loss=step())
                    seen.append((passed, resident()))
            samples = len(list(attnwatch.open_run(run).steps))
    early, late = ([mib for at, mib in seen if low <= at / seconds < high] for low, high in ((0.1, 0.4), (0.7, 1.0)))
    took = [1e3 * (scrape.end - scrape.start) for scrape in scrapes]
    console.print(
        f"soak of {seconds:.0f} s: {LAYERS} watched layers, {len(seen)} steps, {samples} samples, {len(took)} scrapes "
        f"(median {statistics.median(took):.0f} ms, longest {max(took):.0f}); resident memory "
        f"{statistics.median(early):.1f} MiB early, {statistics.median(late):.1f} late",
        soft_wrap=True,
    )


def resident() -> float:
    """MiB."""
    found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="of each measurement (default: %(default)g)")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="also train a watched model for so long")
    options = parser.parse_args()
    if options.seconds < 5:
        parser.error("expected --seconds of at least 5: a scrape comes once a second")
    torch.set_num_threads(1)
    console = Console(highlight=False, width=100)
    table = Table(title=f"{LAYERS} layers x {HEADS} heads x {len(ALL)} metrics, one scrape a second")
    for column in ("exported", "series", "kB", "CPU ms", "scrape ms", "95 %", "stall ms", "worst", "without"):
        table.add_column(column, justify="left" if column == "exported" else "right")
    for name, settings in (
        ("layers", attnwatch.Prometheus(port=0, linger=0)),
        ("+ 1,024 heads", attnwatch.Prometheus(port=0, linger=0, per_head=True)),
        ("+ 2,560 heads", attnwatch.Prometheus(port=0, linger=0, per_head=True, max_heads=LAYERS * HEADS)),
    ):
        table.add_row(*row(name, settings, options.seconds))
    console.print(table)
    if options.soak:
        soak(options.soak, console)


if __name__ == "__main__":
    main()
