"""The samples of several ranks as one: pure functions from what ranks hold to flat arrays that add up, and back.

Every rank lays its numbers out alike: all layers of all ranks, each with all of its heads. Where it holds nothing it
adds 0, or -inf where the largest counts. So one sum and one maximum merge everything, however heads and layers are
spread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_TOPS, _LASTS = len(_LARGEST) + len(_LEAST), len(METRICS) - len(ATTENTION) + 1
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
    starts: Mapping[str, int] = field(default_factory=dict)
    heads: int = 0
    scalars: tuple[str, ...] = ()

    def slots(self, layers: Sequence[Layer], width: int) -> NDArray[np.intp]:
        """`[L, width]`: where the heads of these layers stand; one behind all where there is none.

        A layer that is new, or larger than it was, has no place: the layout follows."""
        whole = {layer.name: layer.heads for layer in self.layers}
        places = [
            (self.starts[x.name] + x.part[0] * x.heads, x.heads)
            if x.name in self.starts and x.heads * x.part[1] <= whole[x.name]
            else (0, 0)
            for x in layers
        ]
        first, heads = np.array(places, int).reshape(-1, 2).T[..., None]
        head = np.arange(width)
        return np.where(head < heads, first + head, self.heads)


class Packed(NamedTuple):
    """Float64 vectors: `sums` merge by adding, `tops` and `last` by the largest. last: of the weights; may be left out,
    being empty, where no rank has any."""

    sums: Numbers
    tops: Numbers
    last: Numbers


def held(reading: Reading, scalars: Iterable[str]) -> Held:
    """Without notes, which name measured errors, and without what only this rank needs for the next sample."""
    layers = tuple(
        Layer(x.name, x.heads, x.kv_heads, x.head_dim, x.dtype, x.qk_norm, x.state, part=x.part, kv_parts=x.kv_parts)
        for x in reading.layers
    )
    return Held(layers, reading.measured, tuple(sorted(scalars)))


def lay_out(ranks: Sequence[Held], notes: Sequence[Mapping[str, str]]) -> Layout:
    """One layout of what all ranks hold, the same on each. notes: of each rank's layers, by name."""
    measured = tuple(dict.fromkeys(name for rank in ranks for name in rank.measured))
    if any(rank.measured != measured for rank in ranks):  # stages, which may be dealt out like cards
        measured = _by_number(measured)
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


def _by_number(names: Sequence[str]) -> tuple[str, ...]:
    """In the order of the numbers in them; what stands between these keeps the order of its first appearance."""
    parts = [re.split(r"(\d+)", name) for name in names]
    order = {text: at for at, text in enumerate(dict.fromkeys(text for split in parts for text in split[::2]))}
    keys = [[int(x) if at % 2 else order[x] for at, x in enumerate(split)] for split in parts]
    return tuple(name for _, name in sorted(zip(keys, names, strict=True)))


def _together(of_ranks: Sequence[tuple[int, Layer]], notes: Sequence[Mapping[str, str]]) -> Layer:
    """A layer is seen as surely as the rank that sees it worst."""
    number, worst = min(of_ranks, key=lambda entry: _STATES.index(entry[1].state))
    note = notes[number].get(worst.name, "")
    if any(layer.state != worst.state for _, layer in of_ranks):
        note = f"rank {number}: {note}"
    heads = max(layer.heads * layer.part[1] for _, layer in of_ranks)
    kv_heads = worst.kv_heads * (worst.kv_parts or worst.part[1])
    return replace(worst, note=note, heads=heads, kv_heads=kv_heads, part=(0, 1), kv_parts=1)


def of_weights(reading: Reading) -> bool:
    """Whether it says anything of weights: they are looked at in some samples."""
    return not np.isnan(reading.values[_LAST]).all()


def pack(layout: Layout, reading: Reading, scalars: Mapping[str, float], signals: Sequence[float]) -> Packed:
    """This rank's share. signals: numbers of which the largest counts."""
    sums = np.zeros((2 * len(_SUMMED), layout.heads + 1))
    tops, last = (np.full((rows, layout.heads + 1), -np.inf) for rows in (_TOPS, _LASTS))
    mine = {layer.name: layer for layer in reading.layers}
    slots = layout.slots([mine[name] for name in reading.measured], reading.values.shape[2])
    values, weights = reading.pairs
    sums[:, slots] = np.concatenate([np.where(weights > 0, values, 0.0)[_SUMMED], weights[_SUMMED]])
    seen = np.where(weights > 0, values, np.nan)
    tops[:, slots] = np.concatenate([seen[_LARGEST], -seen[_LEAST]])
    if of_weights(reading):
        last[:, slots] = np.concatenate([reading.values[_LAST], -reading.values[[_PRINT]]])
    for numbers in (tops, last):
        numbers[np.isnan(numbers)] = -np.inf
    given = [(scalars[name], 1.0) if name in scalars else (0.0, 0.0) for name in layout.scalars]
    return Packed(
        np.concatenate([sums[:, :-1].ravel(), np.array(given).ravel()]),
        np.concatenate([tops[:, :-1].ravel(), np.nan_to_num(np.array(signals, float), nan=-np.inf)]),
        last[:, :-1].ravel(),
    )


def sliced(share: Packed, ranks: int) -> tuple[Numbers, int]:
    """`[ranks, n]`: the share in equal slices, one for each rank to merge; the numbers of each that add up."""
    sums, tops = (
        np.append(x, np.full(-len(x) % ranks, empty)).reshape(ranks, -1)
        for x, empty in ((share.sums, 0.0), (np.append(share.tops, share.last), -np.inf))
    )
    return np.concatenate([sums, tops], 1), sums.shape[1]


def merged(slices: Numbers, adding: int) -> Numbers:
    """`[n]` of all ranks' numbers of one slice, `[ranks, n]`."""
    return np.concatenate([slices[:, :adding].sum(0), slices[:, adding:].max(0)])


def joined(slices: Numbers, adding: int, like: Packed) -> Packed:
    """The merged slices `[ranks, n]` as one again."""
    sums, tops = slices[:, :adding].ravel(), slices[:, adding:].ravel()
    tops, last, _ = np.split(tops, np.cumsum([len(like.tops), len(like.last)]))
    return Packed(sums[: len(like.sums)], tops, last)


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
    sums, given = packed.sums[:cut].reshape(2, len(_SUMMED), layout.heads), packed.sums[cut:].reshape(-1, 2)
    cut = _TOPS * layout.heads
    tops, signals = packed.tops[:cut].reshape(_TOPS, layout.heads), packed.tops[cut:]
    pair = np.zeros((2, len(ATTENTION), layout.heads + 1))
    pair[:, _SUMMED, :-1] = sums
    ends = tops.copy()
    pair[1, _LARGEST + _LEAST, :-1] = ends > -np.inf
    ends[len(_LARGEST) :] *= -1
    pair[0, _LARGEST + _LEAST, :-1] = ends
    flat = np.full((len(METRICS), layout.heads + 1), np.nan, np.float32)
    flat[: len(ATTENTION)] = finished(pair)
    apart = np.zeros(layout.heads + 1, bool)
    if packed.last.size:
        *last, lowest = packed.last.reshape(_LASTS, layout.heads)
        flat[_LAST, :-1] = np.where(np.isneginf(last), np.nan, last)
        highest = flat[_PRINT, :-1]
        apart[:-1] = np.isfinite(highest) & (highest + lowest > _ALIKE * np.abs(highest))

    layers = layout.layers[: len(layout.measured)]
    slots = layout.slots(layers, max((layer.heads for layer in layout.layers), default=0))
    torn = tuple(layers[i].name for i in np.flatnonzero(apart[slots].any(1)))
    slots[[layer.state == "uncovered" for layer in layers]] = layout.heads
    scalars = {name: float(total / count) for name, (total, count) in zip(layout.scalars, given, strict=True) if count}
    return Unpacked(flat[:, slots], pair[:, :, slots], scalars, signals.tolist(), torn)
