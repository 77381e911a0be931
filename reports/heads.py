"""Heat maps of every head over the steps, for every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnwatch.reports import charts, heat
from attnwatch.reports.charts import copyable
from attnwatch.reports.panels import median
from attnwatch.reports.summary import main_alert, onset
from attnwatch.reports.words import UNIT_INTERVAL

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run

FRAMES = 100
Frames = NDArray[np.float32]
"""`[F, L, H]` of one metric: the samples that become frames."""


@dataclass(frozen=True)
class Colours:
    """Values at the quiet and at the loud end."""

    quiet: float
    loud: float
    log: bool = False


SIGNATURE = {
    "entropy_ratio": Colours(0.8, 0.0),
    "qk_rank_ratio": Colours(1.0, 0.2),
    "spread_ratio": Colours(1.0, 30.0, log=True),
    "logit_max": Colours(10.0, 1e4, log=True),
    "first_key_mass": Colours(0.0, 1.0),
}
"""Fixed, so that maps of different runs and pages compare. The loud end is the signature of collapse: low entropy, few
directions, wide logits. Mass: loud is much."""


@dataclass(frozen=True)
class HeatMap:
    """One metric: its colours and the data URI of its frames."""

    metric: str
    colours: Colours
    sprite: str


@dataclass(frozen=True)
class HeatMaps:
    """Maps that share their steps. shown: the frame to show first, at the main alert or the end. marked: worst heads as
    (layer, head) indices. table: a row a layer, the median over its heads of each metric at the frame shown."""

    steps: tuple[int, ...]
    shown: int
    layers: int
    heads: int
    maps: tuple[HeatMap, ...]
    marked: tuple[tuple[int, int], ...]
    table: tuple[tuple[str, tuple[str, ...]], ...]


def frame_indices(steps: NDArray[np.int64], moments: list[int], limit: int) -> NDArray[np.intp]:
    """At most `limit` samples, evenly spread, with the first, the last and those of the moments among them."""
    if not len(steps):
        return np.zeros(0, np.intp)
    wanted = [int(np.clip(np.searchsorted(steps, moment, side="right") - 1, 0, len(steps) - 1)) for moment in moments]
    wanted = wanted[: max(limit - 2, 0)]
    even = np.linspace(0, len(steps) - 1, min(max(limit - len(wanted), 2), len(steps))).round().astype(np.intp)
    return np.unique(np.concatenate([even, np.array(wanted, dtype=np.intp)]))


def frames(run: Run, metrics: int, pixels: int) -> NDArray[np.intp]:
    """Indices of the samples that become frames, for `metrics` maps in at most about `pixels` pixels in all."""
    alert = main_alert(run)
    moments = [step for step in (alert.fired_step if alert else None, onset(run)) if step is not None]
    one = max(len(run.layers) * run.heads * metrics, 1)
    return frame_indices(run.steps, moments, max(2, min(FRAMES, pixels // one)))


def colours_of(name: str, all_runs: Sequence[Frames]) -> Colours:
    """The fixed ones, or those that fit what all runs of the page measured."""
    if name in SIGNATURE:
        return SIGNATURE[name]
    if name in UNIT_INTERVAL:
        return Colours(0.0, 1.0)
    values = charts.finite(*all_runs)
    limits = charts.log_limits(values, spread=50)
    if limits is not None:
        return Colours(float(values.min()), float(values.max()), log=True)
    low, high = charts.limits(values, pad=0.0)
    return Colours(low, high)


def heat_maps(
    run: Run, at: NDArray[np.intp], found: Mapping[str, Frames], scales: Mapping[str, Colours]
) -> HeatMaps | None:
    """The maps of one run; None when nothing was measured. found: the samples `at` of each metric, in order."""
    measured = {name: values for name, values in found.items() if np.isfinite(values).any()}
    if not measured:
        return None
    alert, steps = main_alert(run), run.steps[at]
    shown = len(at) - 1
    if alert is not None and alert.fired_step is not None:
        shown = max(int(np.searchsorted(steps, alert.fired_step, side="right")) - 1, 0)
    maps, columns = [], []
    for name, values in measured.items():
        scale = scales[name]
        maps.append(HeatMap(name, scale, heat.sprite(values, scale.quiet, scale.loud, log=scale.log)))
        columns.append([copyable(float(value)) for value in median(values[shown])])
    places = {name: index for index, name in enumerate(run.layers)}
    worst = alert.heads if alert is not None else ()
    return HeatMaps(
        tuple(int(step) for step in steps),
        shown,
        len(run.layers),
        run.heads,
        tuple(maps),
        tuple((places[layer], head) for layer, head in worst if layer in places and 0 <= head < run.heads),
        tuple((name, row) for name, row in zip(run.layers, zip(*columns, strict=True), strict=True)),
    )
