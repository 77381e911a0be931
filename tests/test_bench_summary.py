"""The table of all figures: what counts as met, what a failure leaves, and figures that a person worked out."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import distributed, overhead, rows, scan, spectrum, summary
from benchmarks.peers.timing import Cost
from benchmarks.summary import Figure, gather
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("figure", "cells"),
    [
        (Figure("a", 1.0099, 1.01), ["1.0099", "at most 1.01", "yes"]),
        (Figure("a", 1.0104, 1.01), ["1.0104", "at most 1.01", "**no**"]),
        (Figure("a", 2.0, 2), ["2", "at most 2", "yes"]),
        (Figure("a", 0.09309, 0.1, "ms"), ["0.0931 ms", "at most 0.1 ms", "yes"]),
        (Figure("a", 5012.3, 1000, "samples/s", True), ["5,012 samples/s", "at least 1,000 samples/s", "yes"]),
        (Figure("a", 998.7, 1000, "samples/s", True), ["999 samples/s", "at least 1,000 samples/s", "**no**"]),
        (Figure("a", math.nan, 1, "s"), ["nan s", "at most 1 s", "**no**"]),
        (Figure("a", math.nan, 1, "s", True), ["nan s", "at least 1 s", "**no**"]),
    ],
)
def test_a_goal_is_a_ceiling_or_a_floor_and_nothing_found_meets_none(figure: Figure, cells: list[str]) -> None:
    assert figure.row() == ["a", *cells]


def two(quick: bool) -> Iterator[Figure]:
    yield Figure("size", 3 if quick else 30, 5, "MB")
    yield Figure("time", 7, 5, "s")


def broken(quick: bool) -> Iterator[Figure]:
    yield Figure("half of it", 1, 5, "s")
    raise RuntimeError("the disk\nis full")


def ends(quick: bool) -> Iterator[Figure]:
    raise SystemExit("not the measurement it should be")
    yield


TABLE = """\
| what | found | goal | met |
| --- | --- | --- | --- |
| half of it | 1 s | at most 5 s | yes |
| broken | RuntimeError: the disk is full |  | **failed** |
| ends | SystemExit: not the measurement it should be |  | **failed** |
| size | 3 MB | at most 5 MB | yes |
| time | 7 s | at most 5 s | **no** |
"""


def test_a_benchmark_that_fails_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missed goal is no failure."""
    monkeypatch.setattr(summary, "BENCHMARKS", {"broken": broken, "ends": ends, "two": two})
    monkeypatch.setattr(sys, "argv", ["summary", "--quick"])
    assert summary.main() == 1
    about, _, table = capsys.readouterr().out.partition("\n\n")
    assert table == TABLE
    for part in (f"torch {torch.__version__}", "cores", "GiB", "load average"):
        assert part in about
    monkeypatch.setattr(sys, "argv", ["summary", "--only", "two"])
    assert summary.main() == 0
    assert "| size | 30 MB | at most 5 MB | **no** |" in capsys.readouterr().out


def found(figures: Iterator[Figure]) -> list[tuple[float, float, str]]:
    return [(pytest.approx(figure.found), figure.goal, figure.unit) for figure in figures]


def test_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1 s to which a sample adds 0.1 s and a look 0.3: (4 x 0.1 + 0.3) / 5 a sample, a 20th of it a step.

    Training takes 1000 MiB more than what was there before, watching 15 more."""
    look = overhead.SPECTRUM_EVERY - 1
    taken = [(1.3 if n % overhead.SPECTRUM_EVERY == look else 1.1, 1.0) for n in range(overhead.ROUND)]
    monkeypatch.setattr(overhead, "QUICK", overhead.QUICK[:1])
    monkeypatch.setattr(overhead, "pairs", lambda case, every, count: taken)
    monkeypatch.setattr(overhead, "peak_memory", lambda size, every: (1115.0 if every else 1100.0, 100.0))
    assert found(summary.of_overhead(True)) == [(1.007, 1.01, ""), (1.14, 1.10, ""), (1.015, 1.02, "")]


class Narrow(nn.Module):
    """An attention as wide as that of a 7B model to its reader, and small inside."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4096, 16, bias=False) for _ in range(3))
        self.o = nn.Linear(16, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 4096]
        q, k, v = (side(x).unflatten(-1, (2, 8)).transpose(1, 2) for side in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return out


def test_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grams of 1 s, a spectrum of 1.9 s. Then steps of 10 s: a sample every 20 adds 0.5 s, every fifth one 1 s instead,
    0.5 x 4 / 100 + 1 / 100 = 0.03 s a step, 0.3 %."""
    monkeypatch.setitem(spectrum.SHAPES, "7B", (2, 4, 8))
    monkeypatch.setattr(spectrum, "Block", Narrow)
    answers = iter([[1.0, 1.9, 5.0], [10.0, 10.5, 11.0]])
    monkeypatch.setattr(spectrum, "seconds", lambda *ways, **how: next(answers))
    assert found(summary.of_spectrum(True)) == [(1.9, 2, ""), (0.3, 1, "%")]


def test_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = distributed.Cost(*[0.0] * len(distributed.Cost._fields))._replace(ours_cpu=2.5, ours=7.0)
    monkeypatch.setattr(distributed, "together", lambda count, samples: cost)
    assert found(summary.of_distributed(True)) == [(2.5, 5, "ms"), (7.0, 5, "ms")]


def test_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ours is held against the cheapest of the others, at each length."""
    ratios = {
        "attnwatch, every=1": (1.25, 1.1),
        "attnwatch, every=1, every row": (1.4, 1.3),
        "whole maps by hand": (1.31, 1.6),
        "torch-module-monitor, entropy": (1.34, 1.5),
        "torch-module-monitor": (1.36, 1.55),
    }
    monkeypatch.setattr(summary, "costs", lambda name, steps: [Cost(ratio, None) for ratio in ratios[name]])
    assert found(summary.of_peers(False)) == [(1.25, 1.31, ""), (1.4, 1.31, ""), (1.1, 1.5, ""), (1.3, 1.5, "")]
    assert [figure.what.rpartition(": ")[2] for figure in summary.of_peers(False)][1:3] == [
        "whole maps by hand",
        "torch-module-monitor, entropy",
    ]


def test_a_small_scan_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command itself, of a real checkpoint of 2 x 64 x 64 halves."""
    real = scan.measured
    monkeypatch.setattr(scan, "measured", lambda layers, width: real(1, 64))
    cpu, clock, peak = summary.of_scan(True)
    assert (cpu.unit, clock.unit, peak.unit) == ("s", "s", "GB")
    assert min(cpu.found, clock.found) > 0
    assert 0.01 < peak.found < 1.5
    assert "0.0 GB" in cpu.what


def test_small_runs_are_measured() -> None:
    """Written, drawn and replayed for real."""
    figures: list[Any] = [*summary.of_store(True, 2, 2), *summary.of_report(True, 40, 2, 2)]
    assert [figure.unit for figure in figures] == ["ms", "ms", "MB", "s", "samples/s"]
    assert all(figure.found > 0 for figure in figures)
    assert figures[2].found < 5


def test_rows_are_compared() -> None:
    assert rows.compare(64, 1).error < 6e-6


def test_progress_is_told_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    gather({"two": two}, True)
    told = capsys.readouterr().err
    assert "1 of 1: two" in told
    assert "size | 3 MB | at most 5 MB | yes" in told
