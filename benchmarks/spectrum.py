"""What the spectrum of a layer costs, against two Gram products and against plain SVD, and what a look at a 7B-shaped
layer costs against training it. Two tables.

CPU time of one thread, the ways in turn, so that other programs on the machine disturb all alike. `live` is what
watching runs, `exact` what scans and `qk_statistics` run, by QR in float64; both without the values over all heads of
narrow layers. A look at the 7B-shaped layer is the mean of four: one of four takes the step's update too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from attnwatch.hooks.probe import Probe
from attnwatch.hooks.spectrum import SPECTRUM, spectrum

SHAPES = {"GPT-2": (12, 64, 768), "1B": (32, 64, 2048), "7B": (32, 128, 4096), "70B": (64, 128, 8192)}
"""Heads, their width, features that a layer reads."""

SHOWN = ("qk_sigma_max", "qk_energy_top10", "qk_rank")
SAMPLE, LOOK = 20, 100  # steps from sample to sample, and from look to look, by default


def seconds(
    *ways: Callable[[], object], rounds: int, average: Callable[[list[float]], float] = statistics.median
) -> list[float]:
    """CPU seconds of each, taken in turn."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, times in zip(ways, taken, strict=True):
            start = time.process_time()
            way()
            times.append(time.process_time() - start)
    return [average(times) for times in taken]


def weights(heads: int, d: int, d_in: int) -> tuple[Tensor, Tensor]:
    """Spectra that fall, as trained ones do: float32 `[heads, d, d_in]` each."""
    g = torch.Generator().manual_seed(0)
    fall = torch.linspace(1, 0.05, d)[:, None]
    w_q, w_k = ((fall * torch.randn(heads, d, d_in, generator=g)) / d_in**0.5 for _ in range(2))
    return w_q, w_k


def plain(w_q: Tensor, w_k: Tensor) -> dict[str, float]:
    """The numbers of SHOWN of one head `[d, d_in]`, by SVD of its whole product, in float64."""
    sigma = torch.linalg.svdvals(w_q.double().mT @ w_k.double())
    share = sigma**2 / (sigma**2).sum()
    rank = torch.special.entr(share).sum().exp()
    return dict(zip(SHOWN, (float(sigma[0]), float(share[:10].sum()), float(rank)), strict=True))


def compare(table: Table, name: str, rounds: int, whole: bool) -> None:
    """One row. whole: the SVD too, of one head, times the number of heads."""
    heads, d, d_in = SHAPES[name]
    w_q, w_k = weights(heads, d, d_in)
    grams, live, exact = seconds(
        lambda: (w_q @ w_q.mT, w_k @ w_k.mT),
        lambda: spectrum(w_q, w_k, exact=False, whole=False),
        lambda: spectrum(w_q, w_k, whole=False),
        rounds=rounds,
    )
    row = [name, f"{heads} x {d} x {d_in}", f"{1e3 * grams:.1f}", f"{1e3 * live:.1f}", f"{live / grams:.2f}"]
    row += [f"{1e3 * exact:.1f}", "", ""]
    if whole:
        start = time.process_time()
        true = plain(w_q[0], w_k[0])
        row[6] = f"{(time.process_time() - start) * heads:.1f} s"
        names = [s.name for s in SPECTRUM]
        found = spectrum(w_q[:1], w_k[:1], exact=False)[:, 0].tolist()
        row[7] = f"{max(abs(found[names.index(key)] / value - 1) for key, value in true.items()):.0e}"
    table.add_row(*row)


class Block(nn.Module):
    """A layer of a 7B model: 4096 wide, 32 heads of 128, a gated MLP of 11008."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4096, 4096, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
        self.down = nn.Linear(11008, 4096, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(4096), nn.RMSNorm(4096)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 4096]
        y = self.norm_1(x)
        q, k, v = (side(y).unflatten(-1, (32, 128)).transpose(1, 2) for side in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y = self.norm_2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def against_training(table: Table, tokens: int, rounds: int) -> None:
    """A training step of one layer alone, with a sample, and with a sample that looks at the weights too."""
    torch.manual_seed(0)
    layer = Block()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)  # the cheapest there is: the share is at its largest
    x = torch.randn(1, tokens, 4096)
    probe = Probe(layer)

    def train(look: bool | None) -> None:
        if look is not None:
            probe.arm(look)
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if look is not None:
            reading = probe.finish()
            if reading.problems or {found.state for found in reading.layers} != {"verified"}:
                raise SystemExit(f"not the measurement it should be: {reading.problems} {reading.layers}")

    train(True)
    ways = (lambda: train(None), lambda: train(False), lambda: train(True))
    step, sample, look = seconds(*ways, rounds=rounds, average=statistics.mean)
    share = (sample - step) * (1 / SAMPLE - 1 / LOOK) / step + (look - step) / LOOK / step
    table.add_row(
        str(tokens), *(f"{value:.2f}" for value in (step, sample - step, look - step)), f"{100 * share:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, SVD of GPT-2's shape only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, rounds = Console(width=110), 5 if options.quick else 15
    table = Table(title=f"The spectrum of a layer, CPU milliseconds of one thread, torch {torch.__version__}")
    for column in ("", "heads x d x d_in", "two Grams", "live", "over Grams", "exact", "plain SVD", "error of live"):
        table.add_column(column, justify="right")
    for name in ("GPT-2", "1B", "7B") if options.quick else SHAPES:
        compare(table, name, rounds, whole=name == "GPT-2" or (not options.quick and name != "70B"))
    console.print(table)
    table = Table(
        title=f"One layer of 7B shape, CPU seconds of one thread; a sample every {SAMPLE}, a look every {LOOK}"
    )
    for column in ("tokens a step", "training step", "a sample adds", "a look adds", "default cadence"):
        table.add_column(column, justify="right")
    against_training(table, 512, 4 if options.quick else 8)
    console.print(table)


if __name__ == "__main__":
    main()
