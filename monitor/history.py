"""A head's own past: what takes in one value a sample and keeps no more than it needs.

Values are float64 `[L, H]` (layers x heads). Layers and heads may be added from call to call, at the end of their
axis; they start with no past. What is not finite is not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.sample import Metric, Sample
from attnwatch.monitor.state import State, freeze, thaw

Array = NDArray[np.float64]


def _grown(state: NDArray[Any], x: Array, blank: float = np.nan) -> NDArray[Any]:
    """The state with rows and columns of `blank` for the layers and heads that are new in x."""
    rows, columns = x.shape[0] - state.shape[-2], x.shape[1] - state.shape[-1]
    if rows <= 0 and columns <= 0:
        return state
    widths = [(0, 0)] * (state.ndim - 2) + [(0, max(0, rows)), (0, max(0, columns))]
    return np.pad(state, widths, constant_values=blank)


class Extreme:
    """Running `pick` of the finite values; with `pick` that keeps the old one, the first of them."""

    def __init__(self, pick: Callable[[Array, Array], Array]) -> None:
        self._pick = pick
        self._state: Array = np.empty((0, 0))

    def __call__(self, x: Array) -> Array:
        finite = np.isfinite(x)
        known = x if np.count_nonzero(finite) == x.size else np.where(finite, x, np.nan)
        self._state = self._pick(_grown(self._state, x), known)
        return self._state

    def state(self) -> State:
        return freeze(self._state)

    def restore(self, state: State) -> None:
        self._state = thaw(state)
        if self._state.ndim != 2:
            raise ValueError(f"an extreme of shape {list(self._state.shape)}")


def first(state: Array, x: Array) -> Array:
    return np.where(np.isnan(state), x, state)


class Window:
    """`reduce` over each head's last n finite values `[n, L, H]`, oldest first."""

    def __init__(self, reduce: Callable[[Array], Array], n: int) -> None:
        self._reduce = reduce
        self._n = n
        # A head's i-th finite value is at i % n, and again n further on: any n of them lie in one piece.
        self._ring: Array = np.empty((2 * n, 0, 0))
        self._counts: NDArray[np.int64] | int = 0  # finite values that each head had so far; a number: all of them

    def __call__(self, x: Array) -> Array:
        if x.shape != self._ring.shape[1:]:
            self._grow(x)
        finite = np.isfinite(x)
        if isinstance(self._counts, int) and np.count_nonzero(finite) == x.size > 0:
            return self._whole(x, self._counts)
        n, counts = self._n, np.broadcast_to(self._counts, x.shape)
        place = (counts % n)[None]
        newest = np.where(finite, x, np.take_along_axis(self._ring, place, 0)[0])[None]
        np.put_along_axis(self._ring, place, newest, 0)
        np.put_along_axis(self._ring, place + n, newest, 0)
        counts = counts + finite
        self._counts = _level(counts)
        oldest_first = counts % n + np.arange(n)[:, None, None]
        reduced = self._reduce(np.take_along_axis(self._ring, oldest_first, 0))
        return np.where(finite & (counts >= n), reduced, np.nan)

    def _whole(self, x: Array, count: int) -> Array:
        """The usual case, made fast: every head has a value, and all have theirs at the same place of the ring."""
        n, at = self._n, count % self._n
        self._ring[at] = self._ring[at + n] = x
        self._counts = count + 1
        if count + 1 < n:
            return np.full(x.shape, np.nan)
        return self._reduce(self._ring[at + 1 : at + 1 + n])

    def _grow(self, x: Array) -> None:
        counts = np.broadcast_to(self._counts, self._ring.shape[1:])
        self._ring, self._counts = _grown(self._ring, x), _level(_grown(counts, x, 0))

    def state(self) -> State:
        counts = np.broadcast_to(self._counts, self._ring.shape[1:])
        return {"ring": freeze(self._ring[: self._n]), "count": freeze(counts)}

    def restore(self, state: State) -> None:
        ring, counts = thaw(state["ring"]), thaw(state["count"])
        if ring.shape != (self._n, *counts.shape):
            raise ValueError(f"a window of shape {list(ring.shape)}")
        self._ring, self._counts = np.concatenate((ring, ring)), _level(counts.astype(np.int64))


def _level(counts: NDArray[np.int64]) -> NDArray[np.int64] | int:
    """One number for all where they are equal."""
    if counts.size == 0:
        return 0
    first = int(counts.flat[0])
    return first if (counts == first).all() else counts


def mean(window: Array) -> Array:
    return np.asarray(np.add.reduce(window, 0) / len(window))


_SHORT = 8  # rows: whole rows are then compared faster than each head's are sorted


def median(window: Array) -> Array:
    low, high = (len(window) - 1) // 2, len(window) // 2
    if len(window) > _SHORT:
        rows = list(np.partition(window, sorted({low, high}), 0))
    else:  # neighbours change places until all are in order
        rows = list(window)
        for turn in range(len(rows)):
            for i in range(turn % 2, len(rows) - 1, 2):
                rows[i], rows[i + 1] = np.minimum(rows[i], rows[i + 1]), np.maximum(rows[i], rows[i + 1])
    return np.array(rows[low] if low == high else (rows[low] + rows[high]) / 2)  # no view of the window


def slope(window: Array) -> Array:
    t = np.arange(len(window)) - (len(window) - 1) / 2
    return np.asarray(np.tensordot(t / (t @ t), window - window[0], 1))  # less the first: exactly 0 of what stays


class Heads:
    """The newest numbers of every head, a row for each layer in the order in which layers were first seen."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = tuple(metric.name for metric in metrics)
        self._held = [index for index, metric in enumerate(metrics) if metric.merge == "last"]
        self._rows: dict[str, int] = {}
        self._last: Array = np.empty((len(self._held), 0, 0))  # of the held metrics, the last finite value of each head
        self.exist = np.empty((0, 0), bool)
        """`[L, H]`: of which heads any number was ever measured; the others are padding or uncovered."""
        self.values: dict[str, Array] = {}
        """`[L, H]` of each metric. Merge "last": the last finite one, where the head gave any number this time.

        A head that gave nothing is NaN throughout: what it was like before must not pass for what it is like now.
        """

    @property
    def layers(self) -> list[str]:
        return list(self._rows)

    def take(self, sample: Sample, unproved: Collection[str] = ()) -> None:
        """unproved: layers whose held values are forgotten."""
        for layer in sample.layers:
            self._rows.setdefault(layer, len(self._rows))
        new = self._placed(self._of(sample), [self._rows[layer] for layer in sample.layers])
        present = ~np.isnan(new).all(axis=0)
        self.exist = present | _grown(self.exist, new[0], False)
        held = new[self._held]
        self._last = _grown(self._last, new[0])
        self._last[:, [self._rows[layer] for layer in unproved if layer in self._rows]] = np.nan
        np.copyto(self._last, held, where=np.isfinite(held))
        new[self._held] = self._last if present.all() else np.where(present, self._last, np.nan)
        self.values = dict(zip(self._metrics, new, strict=True))

    def _placed(self, values: NDArray[np.float32], rows: list[int]) -> Array:
        """`[M, L, H]` with the layers of a sample in their rows; NaN in the others, and where layers are wider."""
        width = max(values.shape[2], self.exist.shape[1])
        if rows == list(range(len(self._rows))) and width == values.shape[2]:
            return values.astype(np.float64)
        new = np.full((len(self._metrics), len(self._rows), width), np.nan)
        new[:, rows, : values.shape[2]] = values
        return new

    def _of(self, sample: Sample) -> NDArray[np.float32]:
        """`[M, L, H]` of our metrics, NaN where the sample has none of that name."""
        if sample.metrics == self._metrics:
            return sample.values
        known = dict(zip(sample.metrics, sample.values, strict=True))
        missing = np.full(sample.values.shape[1:], np.nan, np.float32)
        return np.stack([known.get(name, missing) for name in self._metrics])

    def state(self) -> State:
        return {"layers": self.layers, "last": freeze(self._last), "exist": freeze(self.exist)}

    def restore(self, state: State) -> None:
        last, exist = thaw(state["last"]), thaw(state["exist"]) == 1
        if last.shape != (len(self._held), *exist.shape) or len(exist) != len(state["layers"]):
            raise ValueError(f"{len(state['layers'])} layers with values of shape {list(last.shape)}")
        self._rows = {str(layer): row for row, layer in enumerate(state["layers"])}
        self._last, self.exist = last, exist
