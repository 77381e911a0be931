"""What watching costs beside what other open monitors cost: the same small decoder, steps in turn. One table.

The peers are installed from the package index into a directory that is gone afterwards; one that cannot be installed or
run says so in its row. What they measure differs: the table says what.
"""

from __future__ import annotations

import argparse
import importlib
import math
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
from rich.table import Table
from torch import Tensor, nn

import attnwatch

PACKAGES = ("torch-module-monitor==0.1.0", "h5py", "thermoclaw==0.1.6", "trainpulse==0.4.0")
LAYERS, WIDTH, HEADS, TOKENS = 4, 128, 4, 512


class Attention(nn.Module):
    """seen: told of q, k, v and output, for monitors that must be called there."""

    seen: Callable[..., None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, WIDTH]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.seen is not None:
            self.seen(self, q, k, v, y)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [B, T + 1] -> mean loss
        return F.cross_entropy(
            self.head(self.blocks(self.embedding(tokens[:, :-1]))).flatten(0, 1), tokens[:, 1:].flatten()
        )


class Watcher:
    """A monitor, called where its documentation says. This one does nothing."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        self.number = 0

    def before(self) -> None: ...

    def after_backward(self) -> None: ...

    def after_step(self, loss: Tensor) -> None: ...

    def attention(self, model: Decoder, seen: Callable[..., None]) -> None:
        for module in model.modules():
            if isinstance(module, Attention):
                module.seen = seen


class Ours(Watcher):
    every = 1

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        self.monitor = attnwatch.watch(model, run=place / "run", every=self.every, report=False)

    def after_step(self, loss: Tensor) -> None:
        self.monitor.step(loss=loss)


class OursByDefault(Ours):
    every = 20


class WholeMaps(Watcher):
    """What anybody would write first: softmax over all T x T logits and its entropy."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        self.attention(model, self.entropy)

    @torch.no_grad()
    def entropy(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        p = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf).softmax(-1)
        self.found = torch.special.entr(p).sum(-1).mean((0, 2)).tolist()


class ModuleMonitor(Watcher):
    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        library = importlib.import_module("torch_module_monitor")
        self.number, self.monitor = 0, library.ModuleMonitor(monitor_step_fn=lambda step: True)
        self.monitor.set_module(model)
        self.monitor.add_activation_metric("norm", lambda x: x.norm())
        self.monitor.add_parameter_metric("norm", lambda x: x.norm())
        self.monitor.add_gradient_metric("norm", lambda x: x.norm())
        look = importlib.import_module("torch_module_monitor.attention").monitor_scaled_dot_product_attention
        self.attention(
            model, lambda module, q, k, v, y: look(self.monitor, module, q, k, v, is_causal=True, activation=y)
        )

    def before(self) -> None:
        self.monitor.begin_step(self.number)

    def after_backward(self) -> None:
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()

    def after_step(self, loss: Tensor) -> None:
        self.monitor.end_step()
        if not any("entropy" in key for key in self.monitor.get_step_metrics()):
            raise RuntimeError("it measured no entropy")
        self.number += 1


class Thermoclaw(Watcher):
    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        self.observer = importlib.import_module("thermoclaw").Observer(model, optimizer)

    def after_step(self, loss: Tensor) -> None:
        self.observer.step(loss=loss.item())


class Trainpulse(Watcher):
    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        self.number, self.monitor = 0, importlib.import_module("trainpulse").Monitor()

    def after_step(self, loss: Tensor) -> None:
        self.monitor.log("loss", self.number, loss.item())
        self.number += 1


WATCHERS: dict[str, tuple[type[Watcher], str]] = {
    "attnwatch, default": (OursByDefault, "all of attnwatch every 20th step, on disk, with rules"),
    "attnwatch, every=1": (Ours, "all of attnwatch at every step, on disk, with rules"),
    "whole maps by hand": (WholeMaps, "entropy a head at every step, in memory"),
    "torch-module-monitor": (ModuleMonitor, "entropy a head, norms of everything, at every step, in memory"),
    "thermoclaw": (Thermoclaw, "norms and updates of weights at every step, in memory; no attention"),
    "trainpulse": (Trainpulse, "the loss at every step, in memory; no attention"),
}


@contextmanager
def training(kind: type[Watcher], length: int, batch: int) -> Iterator[Callable[[], float]]:
    """A step of training, which returns its CPU seconds."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as place:
        watcher = kind(model, optimizer, Path(place))

        def step() -> float:
            tokens = torch.randint(0, TOKENS, (batch, length + 1), generator=order)
            start = time.process_time()
            watcher.before()
            loss = model(tokens)
            loss.backward()
            watcher.after_backward()
            optimizer.step()
            watcher.after_step(loss.detach())  # some read gradients
            optimizer.zero_grad()
            return time.process_time() - start

        yield step
        if isinstance(watcher, Ours):
            watcher.monitor.close()


def ratio(kind: type[Watcher], length: int, steps: int) -> float:
    with training(Watcher, length, 4) as alone, training(kind, length, 4) as watched:
        alone(), watched()
        pairs = [(watched(), alone()) if n % 2 else (alone(), watched())[::-1] for n in range(steps)]
    return sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one length, fewer steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths, steps = ((256,), 20) if options.quick else ((256, 1024), 60)
    table = Table(title=f"CPU time over unwatched, {LAYERS} layers of {WIDTH}, batches of 4, torch {torch.__version__}")
    for column in ("", *(f"T = {length}" for length in lengths), "what it measures"):
        table.add_column(column, justify="right" if column.startswith("T") else "left")
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, *PACKAGES]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        sys.path.append(place)
        for name, (kind, what) in WATCHERS.items():
            try:
                row = [f"{ratio(kind, length, steps):.2f}" for length in lengths]
            except Exception as error:
                row = [f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"] + [""] * (len(lengths) - 1)
            table.add_row(name, *row, what)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
