"""What a layer's heads amount to: the three numbers that outputs show, since all heads are too many series."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.sample import Sample

STATS = ("min", "mean", "max")


def over_heads(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """`[3, L]` of `[L, H]`: least, mean and largest over the heads. NaN ones are left out, infinite ones count.

    NaN for a layer of which nothing was measured, and for the mean of both infinities.
    """
    numbers = values.astype(np.float64)
    seen = ~np.isnan(numbers)
    count = seen.sum(axis=1)
    lowest = numbers.min(axis=1, initial=np.inf, where=seen)
    highest = numbers.max(axis=1, initial=-np.inf, where=seen)
    with np.errstate(invalid="ignore"):  # +inf and -inf in one layer have no mean
        mean = numbers.sum(axis=1, where=seen) / np.maximum(count, 1)
    return np.where(count > 0, [lowest, mean, highest], np.nan)


def per_layer(sample: Sample, metrics: Iterable[str]) -> dict[str, float]:
    """Values by "metric/layer/stat", of what was measured. Raises KeyError for a metric that does not exist."""
    found: dict[str, float] = {}
    for metric in metrics:
        for stat, row in zip(STATS, over_heads(sample[metric]).tolist(), strict=True):
            found |= {
                f"{metric}/{layer}/{stat}": value
                for layer, value in zip(sample.layers, row, strict=True)
                if value == value  # not NaN
            }
    return found
