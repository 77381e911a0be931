"""For whoever has a CUDA machine: does watching hold there what it holds on a CPU? One table, a few minutes.

Training bit by bit as it was; no wait for the device inside the hooks; every fused kernel read to the same numbers;
compiled models both ways; what it costs. `--device cpu` runs the same checks on a CPU, where there is nothing to wait
for. Exit 1 if a check fails.
"""

from __future__ import annotations

import argparse
import linecache
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnwatch
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe, Reading

TOKENS = 1024
BACKENDS = {
    "cuda": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (SDPBackend.FLASH_ATTENTION,),
}
LOOSE = {"forecast_sharpness", "tied_rows", "update_ratio", "update_rank"}
"""Not compared between kernels: not asked for, decided by the last bit, and of an optimizer's step."""


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    length: int
    batch: int


SHAPES = {"cuda": Shape(12, 1024, 16, 1024, 8), "cpu": Shape(2, 128, 4, 64, 2)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding, self.position = nn.Embedding(TOKENS, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [B, T + 1] -> mean loss
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Bench:
    """What the checks share: a device, its model and its batches."""

    def __init__(self, device: str):
        self.device, self.shape = device, SHAPES[device]

    def model(self) -> Decoder:
        torch.manual_seed(0)
        return Decoder(self.shape).to(self.device)

    def batch(self, seed: int) -> Tensor:
        size = (self.shape.batch, self.shape.length + 1)
        return torch.randint(0, TOKENS, size, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def half(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def training(self, every: int | None, compiled: str = "") -> Iterator[Callable[[int], float]]:
        """A step of training in bfloat16, given its number, returns its seconds. compiled: "", "eager" or "graph"."""
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with tempfile.TemporaryDirectory() as place:
            monitor = None
            if every is not None:
                options: dict[str, Any] = {"compiled": compiled} if compiled else {}
                monitor = attnwatch.watch(model, run=Path(place) / "run", every=every, report=False, **options)
            call = torch.compile(model, fullgraph=True) if compiled else model

            def step(number: int) -> float:
                self.wait()
                start = time.perf_counter()
                with self.half():
                    loss = call(self.batch(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step(loss=loss)
                self.left = [loss.detach(), *(p.detach() for p in model.parameters())]
                self.wait()
                return time.perf_counter() - start

            yield step
            if monitor is not None:
                states = Counter(layer.state for layer in monitor.coverage)
                if set(states) != {"verified"} or monitor.problems:
                    raise CheckError(f"layers {dict(states)}; {'; '.join(p.what for p in monitor.problems)}")
                monitor.close()

    def trained(self, every: int | None, compiled: str = "", steps: int = 4) -> list[Tensor]:
        """The last loss and the weights."""
        with self.training(every, compiled) as step:
            for number in range(steps):
                step(number)
        return [x.clone() for x in self.left]

    def sampled(self, look: bool = True) -> Reading:
        model = self.model().train()
        probe = Probe(model)
        probe.arm(look)
        with self.half():
            loss = model(self.batch(0))
        loss.backward()
        return probe.finish()


class CheckError(Exception):
    """Why a check fails, one line."""


# --- the checks: each returns what to show, or raises CheckError -----------------------------------------------------


def neutral(bench: Bench, compiled: str = "") -> str:
    torch.compiler.reset()
    alone, again = bench.trained(None, compiled), bench.trained(None, compiled)
    if not _same(alone, again):
        raise CheckError("two unwatched runs differ already: nothing can be told")
    for every in (1, 2):
        torch.compiler.reset()
        left = bench.trained(every, compiled)
        # In a sampled step a model compiled without the operator runs eagerly, which rounds otherwise.
        if compiled != "eager" and not _same(alone, left):
            worst = max(float((a - b).abs().max()) for a, b in zip(alone, left, strict=True))
            raise CheckError(f"watched every {every}: losses or weights differ by up to {worst:.1e}")
    return "every layer verified" if compiled == "eager" else "losses and weights bit by bit those unwatched"


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def free_of_waits(bench: Bench) -> str:
    """The forward and backward of a sampled step."""
    if bench.device != "cuda":
        return "a CPU has nothing to wait for"
    model = bench.model().train()
    tokens = bench.batch(0)
    found: Counter[str] = Counter()
    for look in (True, False):
        probe = Probe(model)
        probe.arm(look)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught, bench.half():
                warnings.simplefilter("always")
                model(tokens).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        probe.finish()
        for warning in caught:
            line = linecache.getline(warning.filename, warning.lineno).strip()
            found[f"{Path(warning.filename).name}:{warning.lineno} {line}"] += 1
    if found:
        raise CheckError("; ".join(f"{times} x {where}" for where, times in found.most_common(3)))
    return f"none in two samples of {bench.shape.layers} layers"


def kernel(bench: Bench, backend: SDPBackend) -> str:
    """Every layer proved, and its numbers those that the plain kernel's call gives."""
    with sdpa_kernel(SDPBackend.MATH):
        expected = bench.sampled()
    try:
        with sdpa_kernel(backend):
            reading = bench.sampled()
    except RuntimeError as error:
        if "No available kernel" in str(error) or "no viable backend" in str(error).lower():
            return "not offered by this device"
        raise
    states = {layer.state for layer in reading.layers}
    if states != {"verified"} or reading.problems:
        raise CheckError(f"{states} {reading.problems}")
    worst = 0.0
    for name, ours, theirs in zip([m.name for m in METRICS], reading.values, expected.values, strict=True):
        if name not in LOOSE:
            a, b = torch.from_numpy(ours), torch.from_numpy(theirs)
            if not torch.equal(a.isfinite(), b.isfinite()):
                raise CheckError(f"{name} is known to one kernel only")
            far = ((a - b).abs() / b.abs().clamp(min=0.1)).nan_to_num(nan=0.0).max()
            worst = max(worst, float(far))
    if worst > 0.05:
        raise CheckError(f"a statistic is {worst:.1e} from the plain kernel's")
    return f"verified; statistics within {worst:.0e} of the plain kernel's"


def cost(bench: Bench, every: int, steps: int) -> str:
    """Wall-clock seconds in turn with an unwatched twin."""
    with bench.training(None) as alone, bench.training(every) as watched:
        alone(0), watched(0)
        pairs = [(watched(n), alone(n)) for n in range(1, steps + 1)]
    share = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    return f"{share:.3f} of a step of {1e3 * statistics.median(b for _, b in pairs):.1f} ms, {steps} pairs"


def checks(bench: Bench) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "training, eager", lambda: neutral(bench)
    yield 'training, compiled="eager"', lambda: neutral(bench, "eager")
    yield 'training, compiled="graph"', lambda: neutral(bench, "graph")
    yield "hooks wait for nothing", lambda: free_of_waits(bench)
    for backend in BACKENDS[bench.device]:
        yield backend.name.lower().replace("_", " "), lambda backend=backend: kernel(bench, backend)
    few = bench.device == "cpu"
    yield "cost, every=20", lambda: cost(bench, 20, 20 if few else 200)
    yield "cost, every=1", lambda: cost(bench, 1, 5 if few else 50)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here, so nothing was checked; --device cpu runs the same checks on the CPU")
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
    torch.use_deterministic_algorithms(True, warn_only=True)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    table = Table(title=f"{name}, torch {torch.__version__}, bfloat16")
    for column in ("check", "", "found"):
        table.add_column(column)
    bench, failed = Bench(options.device), 0
    for what, check in checks(bench):
        try:
            table.add_row(what, "ok", check())
        except Exception as error:
            failed += 1
            table.add_row(what, "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    Console(width=120).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
