"""Ways in which the features of one projection can hold the heads of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """What is known of one side of an attention call. side: "q" or "k". queries: query heads; heads: of this side, keys
    perhaps repeated for grouped queries. d: features of a head; value: those of a value head, 0 if unknown."""

    side: str
    queries: int
    heads: int
    d: int
    value: int


class Layout(NamedTuple):
    """`take` maps a projection's `[..., out]` to `[..., heads, size]`; size is d, or the part of it that is projected.
    times: how often the same heads come."""

    label: str
    heads: int
    size: int
    take: Callable[[Tensor], Tensor]
    times: int = 1


def layouts(shape: Shape, out: int, name: str) -> Iterator[Layout]:
    """All layouts of `out` features that fit, commonest first; the name of the weight decides between two of them."""
    side, queries, _, d, _ = shape
    counts = [queries] if side == "q" else [kv for kv in range(shape.heads, 0, -1) if shape.heads % kv == 0]
    grouped = [
        _grouped(side, kv, queries // kv, d)
        for kv in range(queries, 0, -1)
        if queries % kv == 0 and out == kv * (queries // kv + 2) * d
    ]
    blocks = [
        (count, offset)
        for count in counts
        for offset in range(0, out - count * d + 1, count * d)
        if count == counts[0] or offset in (0, queries * d, out - count * d)
    ]
    if side == "k":  # [q; k; v] is by far the commonest fusion: keys right behind the queries, as many as the values
        blocks.sort(key=lambda block: not (block[1] == queries * d and out == (queries + 2 * block[0]) * d))
    plain = [_block(offset, count, d, out) for count, offset in blocks]
    # Grouped queries: neighbours share a key head, or (as einops repeats) every Hk-th one does.
    plain += [_tiled(layout, counts[0]) for layout in plain if 1 < layout.heads < counts[0]]
    yield from grouped + plain if "query_key_value" in name else plain + grouped
    if out == 3 * queries * d:
        yield _innermost(side, queries, d)
    if side == "q" and out == 2 * queries * d:  # the other half of each head opens and closes a gate at its output
        yield _first_of(queries, d, d, f"[{d} q, {d} gate]")
    if side == "k":
        yield from (_key_and_value(kv, d, d) for kv in counts if out == 2 * kv * d)
        part = out // shape.heads - shape.value  # multi-head latent attention: the rest of a key is shared by the heads
        if shape.value and out % shape.heads == 0 and 0 < part < d:
            layout = _key_and_value(shape.heads, part, shape.value)
            yield layout._replace(label=f"{layout.label}; {d - part} features that all heads share are left out")
    if out == counts[0] * d and counts[0] > 1:
        yield _swapped(counts[0], d)


def _block(offset: int, heads: int, d: int, out: int) -> Layout:
    label = "whole" if out == heads * d else f"rows {offset} to {offset + heads * d}"
    return Layout(label, heads, d, lambda x: x[..., offset : offset + heads * d].unflatten(-1, (heads, d)))


def _tiled(layout: Layout, heads: int) -> Layout:
    """Key heads over and over."""
    times = heads // layout.heads
    label = f"{layout.label}, {times} times over"
    return Layout(label, heads, layout.size, lambda x: torch.cat([layout.take(x)] * times, -2), times)


def _grouped(side: str, kv: int, queries: int, d: int) -> Layout:
    def take(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (kv, queries + 2, d))
        return x[..., :queries, :].flatten(-3, -2) if side == "q" else x[..., queries, :]

    return Layout(f"{kv} groups of [{queries} q, k, v]", kv * queries if side == "q" else kv, d, take)


def _innermost(side: str, heads: int, d: int) -> Layout:
    part = 0 if side == "q" else 1
    return Layout("head, feature, [q k v]", heads, d, lambda x: x.unflatten(-1, (heads, d, 3))[..., part])


def _key_and_value(heads: int, key: int, value: int) -> Layout:
    return _first_of(heads, key, value, f"[{key} k, {value} v]")


def _first_of(heads: int, size: int, rest: int, parts: str) -> Layout:
    """Of each head the first `size` features of `size + rest`."""
    label = f"{heads} heads of {parts}"
    return Layout(label, heads, size, lambda x: x.unflatten(-1, (heads, size + rest))[..., :size])


def _swapped(heads: int, d: int) -> Layout:
    return Layout("feature, head", heads, d, lambda x: x.unflatten(-1, (d, heads)).transpose(-1, -2))
