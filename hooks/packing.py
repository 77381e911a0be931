"""The samples of several ranks as one: pure functions from what ranks hold to flat arrays that add up, and back.

Every rank lays its numbers out alike: all layers of all ranks, each with all of its heads. Where it holds nothing it
adds 0, or -inf where the largest counts. So one sum and one maximum merge everything, however heads and layers are
spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.hooks.layers import METRICS, Layer, finished
from attnwatch.hooks.probe import Reading
from attnwatch.hooks.statistics import ATTENTION

Numbers = NDArray[np.float64]

_SUMMED = [i for i, metric in enumerate(ATTENTION) if metric.merge in ("mean", "sum")]
_LARGEST = [i for i, metric in enumerate(ATTENTION) if metric.merge == "max"]
_LEAST = [i for i, metric in enumerate(ATTENTION) if metric.merge == "min"]
_LAST = slice(len(ATTENTION), len(METRICS))
_PRINT = [metric.name for metric in METRICS].index("wq_sigma_max")
"""A fingerprint of weights: the same on all ranks that hold the same head."""

_ALIKE = 1e-3
_STATES = ("uncovered", "logits_only", "verified")  # from the worst


class Held(NamedTuple):
    """What one rank holds: facts of its layers, names of those that gave numbers, names of the scalars it was passed.

    Equal as long as nothing changed that the others must know."""

    layers: tuple[Layer, ...]
    measured: tuple[str, ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Where the numbers stand. layers: as all ranks together see them; measured: those with numbers, in order; starts:
    of their heads among all `heads`; scalars: names."""

    layers: tuple[Layer, ...] = ()
    measured: tuple[str, ...] = ()
    starts: Mapping[str, int] | None = None
    heads: int = 0
    scalars: tuple[str, ...] = ()


class Packed(NamedTuple):
    """Float64 vectors: `sums` merge by adding, `tops` by the largest."""

    sums: Numbers
    tops: Numbers


def held(reading: Reading, scalars: Iterable[str]) -> Held:
    """Without notes, which name measured errors, and without what only this rank needs for the next sample."""
    layers = tuple(
        Layer(x.name, x.heads, x.kv_heads, x.head_dim, x.dtype, x.qk_norm, x.state, part=x.part) for x in reading.layers
    )
    return Held(layers, reading.measured, tuple(sorted(scalars)))


def lay_out(ranks: Sequence[Held], notes: Sequence[Mapping[str, str]]) -> Layout:
    """One layout of what all ranks hold, the same on each. notes: of each rank's layers, by name."""
    measured = tuple(dict.fromkeys(name for rank in ranks for name in rank.measured))
    found: dict[str, list[tuple[int, Layer]]] = {name: [] for name in measured}
    for number, rank in enumerate(ranks):
        for layer in rank.layers:
            if layer.name in rank.measured or layer.name not in measured:
                found.setdefault(layer.name, []).append((number, layer))
    layers = tuple(_together(of_ranks, notes) for of_ranks in found.values())
    starts, heads = {}, 0
    for layer in layers[: len(measured)]:
        starts[layer.name] = heads
        heads += layer.heads
    return Layout(layers, measured, starts, heads, tuple(sorted({name for rank in ranks for name in rank.scalars})))


def _together(of_ranks: Sequence[tuple[int, Layer]], notes: Sequence[Mapping[str, str]]) -> Layer:
    """A layer is seen as surely as the rank that sees it worst."""
    number, worst = min(of_ranks, key=lambda entry: _STATES.index(entry[1].state))
    note = notes[number].get(worst.name, "")
    if any(layer.state != worst.state for _, layer in of_ranks):
        note = f"rank {number}: {note}"
    heads = max(layer.heads * layer.part[1] for _, layer in of_ranks)
    return replace(worst, note=note, heads=heads, kv_heads=worst.kv_heads * worst.part[1], part=(0, 1))


def pack(layout: Layout, reading: Reading, scalars: Mapping[str, float], signals: Sequence[float]) -> Packed:
    """This rank's share. signals: numbers of which the largest counts."""
    sums = np.zeros((2 * len(_SUMMED), layout.heads))
    tops = np.full((len(_LARGEST) + len(_LEAST) + (_LAST.stop - _LAST.start) + 1, layout.heads), -np.inf)
    mine = {layer.name: layer for layer in reading.layers}
    whole = {layer.name: layer.heads for layer in layout.layers}
    for at, name in enumerate(reading.measured):
        layer = mine[name]
        if layout.starts is None or layer.heads * layer.part[1] > whole.get(name, 0):
            continue  # new, or larger than it was: the layout follows
        start = layout.starts[name] + layer.part[0] * layer.heads
        slots = slice(start, min(start + layer.heads, layout.starts[name] + whole[name]))
        row, (values, weights) = reading.values[:, at, : layer.heads], reading.pairs[:, :, at, : layer.heads]
        sums[:, slots] = np.concatenate([np.where(weights > 0, values, 0.0)[_SUMMED], weights[_SUMMED]])
        seen = np.where(weights > 0, values, np.nan)
        parts = [seen[_LARGEST], -seen[_LEAST], row[_LAST], -row[[_PRINT]]]
        tops[:, slots] = np.nan_to_num(np.concatenate(parts), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    given = [(scalars[name], 1.0) if name in scalars else (0.0, 0.0) for name in layout.scalars]
    return Packed(
        np.concatenate([sums.ravel(), np.array(given).ravel()]),
        np.concatenate([tops.ravel(), np.nan_to_num(np.array(signals, float), nan=-np.inf)]),
    )


class Unpacked(NamedTuple):
    """values: float32 `[M, L, H]` over the layout's measured layers; pairs: `[2, A, L, H]`, as in a Reading. scalars:
    means over the ranks that were passed one. signals: the largest. torn: layers of which two ranks hold different
    weights."""

    values: NDArray[np.float32]
    pairs: Numbers
    scalars: dict[str, float]
    signals: list[float]
    torn: tuple[str, ...]


def unpack(layout: Layout, packed: Packed) -> Unpacked:
    """What all ranks together say; also of the share of one."""
    cut = 2 * len(_SUMMED) * layout.heads
    sums, given = packed.sums[:cut].reshape(2, -1, layout.heads), packed.sums[cut:].reshape(-1, 2)
    rows = len(_LARGEST) + len(_LEAST) + (_LAST.stop - _LAST.start) + 1
    tops, signals = packed.tops[: rows * layout.heads].reshape(rows, -1), packed.tops[rows * layout.heads :]
    pair = np.zeros((2, len(ATTENTION), layout.heads))
    pair[:, _SUMMED] = sums
    ends = tops[: len(_LARGEST) + len(_LEAST)].copy()
    pair[1, _LARGEST + _LEAST] = ends > -np.inf
    ends[len(_LARGEST) :] *= -1
    pair[0, _LARGEST + _LEAST] = ends
    last = np.where(tops[len(ends) : -1] > -np.inf, tops[len(ends) : -1], np.nan)
    flat = np.concatenate([finished(pair), last])
    highest, lowest = flat[_PRINT], -tops[-1]
    apart = np.isfinite(highest) & (highest - lowest > _ALIKE * np.abs(highest))

    shape = (len(layout.measured), max((layer.heads for layer in layout.layers), default=0))
    values = np.full((len(METRICS), *shape), np.nan, np.float32)
    pairs = np.zeros((2, len(ATTENTION), *shape))
    torn = []
    for at, layer in enumerate(layout.layers[: len(layout.measured)]):
        assert layout.starts is not None
        slots = slice(layout.starts[layer.name], layout.starts[layer.name] + layer.heads)
        if layer.state != "uncovered":
            values[:, at, : layer.heads], pairs[:, :, at, : layer.heads] = flat[:, slots], pair[:, :, slots]
        if apart[slots].any():
            torn.append(layer.name)
    scalars = {name: float(total / count) for name, (total, count) in zip(layout.scalars, given, strict=True) if count}
    return Unpacked(values, pairs, scalars, signals.tolist(), tuple(torn))
