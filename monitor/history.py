"""A head's own past: what takes in one value a sample and keeps no more than it needs.

Values are float64 `[L, H]` (layers x heads). Layers and heads may be added from call to call, at the end of their
axis; they start with no past. What is not finite is not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.sample import Metric, Sample

Array = NDArray[np.float64]


def _grown(state: Array, x: Array) -> Array:
    """The state with rows and columns of NaN for the layers and heads that are new in x."""
    rows, columns = (max(0, new - old) for new, old in zip(x.shape, state.shape[-2:], strict=True))
    if not rows and not columns:
        return state
    widths = [(0, 0)] * (state.ndim - 2) + [(0, rows), (0, columns)]
    return np.pad(state, widths, constant_values=np.nan)


class Extreme:
    """Running `pick` of the finite values; with `pick` that keeps the old one, the first of them."""

    def __init__(self, pick: Callable[[Array, Array], Array]) -> None:
        self._pick = pick
        self._state = np.empty((0, 0))

    def __call__(self, x: Array) -> Array:
        self._state = self._pick(_grown(self._state, x), np.where(np.isfinite(x), x, np.nan))
        return self._state


def first(state: Array, x: Array) -> Array:
    return np.where(np.isnan(state), x, state)


class Window:
    """`reduce` over each head's last n finite values `[n, L, H]`, oldest first."""

    def __init__(self, reduce: Callable[[Array], Array], n: int) -> None:
        self._reduce = reduce
        self._ring = np.empty((n, 0, 0))  # a head's i-th finite value is at i % n
        self._count = np.empty((0, 0))  # finite values the head had so far; float, so that it grows like the ring

    def __call__(self, x: Array) -> Array:
        n = len(self._ring)
        self._ring = _grown(self._ring, x)
        count = np.nan_to_num(_grown(self._count, x)).astype(np.int64)
        finite = np.isfinite(x)
        at = (count % n)[None]
        np.put_along_axis(self._ring, at, np.where(finite, x, np.take_along_axis(self._ring, at, 0)[0])[None], 0)
        count += finite
        self._count = count.astype(np.float64)
        oldest_first = (count + np.arange(n)[:, None, None]) % n
        reduced = self._reduce(np.take_along_axis(self._ring, oldest_first, 0))
        return np.where(finite & (count >= n), reduced, np.nan)


def mean(window: Array) -> Array:
    return np.asarray(window.mean(0))


def median(window: Array) -> Array:
    middle = np.sort(window, 0)[(len(window) - 1) // 2 : len(window) // 2 + 1]
    return np.asarray(middle.mean(0))


def slope(window: Array) -> Array:
    t = np.arange(len(window)) - (len(window) - 1) / 2
    return np.asarray(np.tensordot(t / (t @ t), window - window[0], 1))  # less the first: exactly 0 of what stays


class Heads:
    """The newest numbers of every head, a row for each layer in the order in which layers were first seen."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = tuple(metrics)
        self._rows: dict[str, int] = {}
        self._last: dict[str, Array] = {metric.name: np.empty((0, 0)) for metric in metrics if metric.merge == "last"}
        self._ever = np.empty((0, 0))  # 1 for a head of which any number was ever measured, else NaN
        self.values: dict[str, Array] = {}
        """`[L, H]` of each metric. Merge "last": the last finite one, where the head gave any number this time.

        A head that gave nothing is NaN throughout: what it was like before must not pass for what it is like now.
        """

    @property
    def layers(self) -> list[str]:
        return list(self._rows)

    @property
    def exist(self) -> NDArray[np.bool_]:
        """`[L, H]`: of which heads any number was ever measured; the others are padding or uncovered."""
        return ~np.isnan(self._ever)

    def take(self, sample: Sample) -> None:
        for layer in sample.layers:
            self._rows.setdefault(layer, len(self._rows))
        rows = [self._rows[layer] for layer in sample.layers]
        width = sample.values.shape[2]
        blank = np.full((len(self._rows), max(width, self._ever.shape[1])), np.nan)
        for metric in self._metrics:
            self.values[metric.name] = new = blank.copy()
            if metric.name in sample.metrics:
                new[rows, :width] = sample[metric.name]
        present = ~np.isnan(list(self.values.values())).all(axis=0)
        self._ever = np.where(present, 1.0, _grown(self._ever, blank))
        for name, last in self._last.items():
            new = self.values[name]
            self._last[name] = np.where(np.isfinite(new), new, _grown(last, blank))
            self.values[name] = np.where(present, self._last[name], np.nan)
