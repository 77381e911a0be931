"""The statistics of attention maps against worked values and a slow float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnwatch.hooks import statistics
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.statistics import (
    ATTENTION,
    attention_statistics,
    finish,
    measure,
    merge,
    sample_rows,
    sample_sequences,
)

NAMES = [s.name for s in ATTENTION]
INF = float("inf")


def call(seed: int) -> tuple[dict[str, Any], torch.Generator]:
    """A random attention call: arguments of `Attention`."""
    g = torch.Generator().manual_seed(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=g))]

    batch, kv_heads, group = one_of(1, 2, 3), one_of(1, 2, 3), one_of(1, 2, 4)
    heads, d = kv_heads * group, one_of(2, 5, 8)
    queries = one_of(1, 3, 8, 17)
    keys = one_of(queries, queries, 4, 13)
    dtype = one_of(torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    sharp = one_of(0.5, 1.0, 4.0)
    made: dict[str, Any] = {
        "q": (sharp * torch.randn(batch, heads, queries, d, generator=g)).to(dtype),
        "k": torch.randn(batch, kv_heads, keys, d, generator=g).to(dtype),
        "causal": one_of(False, True, True),
        "window": one_of(None, None, 1, 3),
        "scale": one_of(None, None, 0.3, torch.rand(heads, generator=g), torch.tensor(0.7)),
        "softcap": one_of(None, None, 2.0),
        "sinks": one_of(None, None, torch.randn(heads, generator=g)),
    }
    shape = [batch, heads, queries, keys]
    for name, odds in (("mask", 4), ("bias", 2)):
        if one_of(*[True] * odds, False):
            dims = [one_of(1, n) for n in shape][one_of(0, 0, 1, 2) :]
            numbers = torch.randn(dims, generator=g)
            shown = torch.rand(dims, generator=g) < one_of(0.6, 0.9)
            hidden = one_of(-INF, torch.finfo(torch.float32).min)
            if name == "bias":
                made[name] = numbers
            else:
                made[name] = one_of(shown, torch.where(shown, numbers, hidden))
    if one_of(False, False, False, True):  # left padding
        padding = torch.arange(keys) >= torch.randint(keys, (batch, 1), generator=g)
        made["mask"] = padding[:, None, None, :]
    return made, g


def assert_close(found: dict[str, Tensor], expected: dict[str, list[float]], rank_tolerance: float = 1e-3) -> None:
    for name in NAMES:
        torch.testing.assert_close(
            found[name].double(),
            torch.tensor(expected[name], dtype=torch.float64),
            rtol=rank_tolerance if name == "map_rank" else 1e-4,
            atol=1e-6,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def named(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return dict(zip(NAMES, finish(pair).unbind(), strict=True))


@pytest.mark.parametrize("seed", range(150))
def test_agrees_with_the_definitions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mix of grouping, masks, bias, soft-cap, sink, dtype and shape; blocks of every size."""
    made, _ = call(seed)
    monkeypatch.setattr(statistics, "BLOCK", (2**20, 2**10, 150, 40, 1)[seed % 5])
    assert_close(attention_statistics(**made), reference.attention_statistics(**made))


@pytest.mark.parametrize("seed", range(150, 190))
def test_agrees_on_some_rows_of_some_sequences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, g = call(seed)
    monkeypatch.setattr(statistics, "BLOCK", (2**20, 300, 60)[seed % 3])
    batch, queries = made["q"].shape[0], made["q"].shape[2]
    sequences = torch.randperm(batch, generator=g)[: max(1, batch - 1)].tolist()
    rows = sample_rows(queries, 5, 0.3)
    found = named(measure(Attention(**made), sequences, rows))
    assert_close(found, reference.attention_statistics(**made, sequences=sequences, rows=rows))
