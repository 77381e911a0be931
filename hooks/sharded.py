"""Calls on DTensors (tensor parallelism), seen as what this rank computes of them: no collective is ever entered.

A call may be looked at on the local parts alone if each of them is a complete smaller call: a projection that is split
by its output features, attention that is split by heads or sequences, a norm whose features are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnwatch.hooks.tap import Tap
from attnwatch.hooks.transforms import bare

WHOLE = (0, 1)
"""Part 0 of 1."""


def is_sharded(x: object) -> bool:
    return type(x).__name__ == "DTensor"


def local(x: Any) -> Any:
    """What this rank holds of a tensor; anything else as it is."""
    return x.to_local() if is_sharded(x) else bare(x) if isinstance(x, Tensor) else x


def sharded(tap: Tap, handler: Callable[..., None], func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Let the handler of a function look at this rank's part of the call, if that is a call of its own."""
    split = _SPLITS.get(getattr(func, "__name__", ""))
    tensors: list[Any] = [x for x in (*args, *kwargs.values(), out) if isinstance(x, Tensor)]
    if split is None or any(placement.is_partial() for x in tensors if is_sharded(x) for placement in x.placements):
        return
    part = split([(_dims(x), x) for x in tensors])
    if part is None:
        return
    if part != WHOLE:
        tap.site.part = part
    tap.parts = part[1]
    try:
        handler(tap, func, [local(x) for x in args], {name: local(x) for name, x in kwargs.items()}, local(out))
    finally:
        tap.parts = 1


_Given = list[tuple[set[int], Tensor]]
"""The tensors of a call, its result last, each with the dimensions in which it is split, counted from the end."""


def _dims(x: Any) -> set[int]:
    if not is_sharded(x):
        return set()
    return {placement.dim % x.dim() - x.dim() for placement in x.placements if hasattr(placement, "dim")}


def _linear(given: _Given) -> tuple[int, int] | None:
    """`input [..., in]`, `weight [out, in]`: the features that are summed over must be whole."""
    (source, _), (split, weight), *_ = given
    return None if -1 in source | split else _part(weight, 0)


def _attention(given: _Given) -> tuple[int, int] | None:
    """`[B, H, T, d]`: positions and features must be whole, keys and values split as the queries are."""
    splits = [dims for dims, x in given[:3]]
    whole = {-1, -2}.isdisjoint(splits[0]) and splits[0] == splits[1] == splits[2]
    return _part(given[0][1], 1) if whole else None


def _norm(given: _Given) -> tuple[int, int] | None:
    return None if any(-1 in dims for dims, _ in given) else WHOLE


_SPLITS: dict[str, Callable[[_Given], tuple[int, int] | None]] = {
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "normalize": _norm,
}


def _part(x: Any, dim: int) -> tuple[int, int]:
    """Which part, of how many equal ones, of a dimension this rank holds."""
    index, count = WHOLE
    if is_sharded(x):
        for axis, placement in enumerate(x.placements):
            if getattr(placement, "dim", None) == dim:
                size = x.device_mesh.size(axis)
                index, count = index * size + x.device_mesh.get_local_rank(axis), count * size
    return index, count
