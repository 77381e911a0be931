"""Grouped queries cost no more than as many heads without groups: counted in operations and elements, not in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import attnwatch


class Elements(TorchDispatchMode):
    """How many operations ran, and how many elements they made (views made none)."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if not func.is_view:
            for x in out if isinstance(out, list | tuple) else [out]:
                self.elements += x.numel() if isinstance(x, Tensor) else 0
        return out


def cost(measured: Callable[[], Any]) -> tuple[int, int, int]:
    """Operations, elements, floating-point operations of products."""
    with Elements() as seen:
        measured()
    with FlopCounterMode(display=False) as flops:
        measured()
    return seen.operations, seen.elements, flops.get_total_flops()


@pytest.mark.parametrize("rows", [16, None])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": torch.ones(2, 1, 64, 64, dtype=torch.bool).tril()}])
def test_statistics_of_maps(rows: int | None, options: dict[str, Any]) -> None:
    def measured(kv: int) -> Callable[[], Any]:
        q, k = torch.randn(2, 8, 64, 16), torch.randn(2, kv, 64, 16)
        return lambda: attnwatch.attention_statistics(q, k, rows=rows, **options)

    full = cost(measured(8))
    for kv in (1, 2, 4):
        grouped = cost(measured(kv))
        assert all(some <= every for some, every in zip(grouped, full, strict=True)), (kv, grouped, full)


def test_statistics_of_weights() -> None:
    def measured(kv: int) -> Callable[[], Any]:
        w_q, w_k = torch.randn(8 * 16, 64), torch.randn(kv * 16, 64)
        return lambda: attnwatch.qk_statistics(w_q, w_k, heads=8, kv_heads=kv)

    full = cost(measured(8))
    for kv in (1, 2, 4):
        grouped = cost(measured(kv))
        assert all(some <= every for some, every in zip(grouped[1:], full[1:], strict=True)), (kv, grouped, full)
