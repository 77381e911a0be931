"""Windows over heads of which some miss values and some come later, against each head's own list of values."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from attnwatch.monitor.history import Array, Window, mean, median, slope


def least_squares(values: list[float]) -> float:
    return float(np.polyfit(range(len(values)), values, 1)[0])


def expected(reduce: Callable[[list[float]], float], n: int, past: list[float]) -> float:
    finite = [value for value in past if np.isfinite(value)]
    return reduce(finite[-n:]) if np.isfinite(past[-1]) and len(finite) >= n else np.nan


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 20])
@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(mean, statistics.fmean), (median, statistics.median), (slope, least_squares)]
)
def test_a_window_is_of_each_heads_own_last_values(
    ours: Callable[[Array], Array], theirs: Callable[[list[float]], float], missing: float, n: int
) -> None:
    """In the middle it is saved and goes on as another object; then a layer and a head come, with no past."""
    if ours is slope and n == 1:
        return
    rng = np.random.default_rng(n)
    window = Window(ours, n)
    pasts: dict[tuple[int, int], list[float]] = {}
    for sample in range(60):
        if sample == 30:
            state, window = json.loads(json.dumps(window.state())), Window(ours, n)
            window.restore(state)
        x: NDArray[np.float64] = rng.integers(-3, 4, (3, 4) if sample > 40 else (2, 3)) / 4  # with many ties
        x[rng.random(x.shape) < missing] = rng.choice([np.nan, np.inf, -np.inf])
        found = window(x)
        for place in np.ndindex(x.shape):
            pasts.setdefault(place, []).append(x[place])
            np.testing.assert_allclose(found[place], expected(theirs, n, pasts[place]), rtol=1e-12, atol=1e-12)


def test_what_a_window_gave_stays_as_it_was() -> None:
    for reduce in (mean, median):
        window = Window(reduce, 1)
        first = window(np.array([[1.0]]))
        window(np.array([[2.0]]))
        assert first.item() == 1.0
