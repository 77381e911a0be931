"""Samples made up for the tests of rules, and what an engine says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from attnwatch.monitor.rules import Engine
from attnwatch.monitor.sample import Coverage, Metric, Sample

NAN = math.nan
METRICS = tuple(
    Metric(name, "1", "", merge)
    for name, merge in {
        "logit_max": "max",
        "spread_ratio": "mean",
        "entropy_ratio": "mean",
        "first_key_mass": "mean",
        "map_rank": "mean",
        "nonfinite": "sum",
        "qk_rank_ratio": "last",
        "logit_bound": "last",
        "bound_use": "last",
    }.items()
)
HEALTHY = {
    "logit_max": 9.0,
    "spread_ratio": 1.5,
    "entropy_ratio": 0.4,
    "first_key_mass": 0.3,
    "map_rank": 12.0,
    "nonfinite": 0.0,
    "qk_rank_ratio": 0.75,
}
COLLAPSED = HEALTHY | {"logit_max": 60.0, "spread_ratio": 12.0, "entropy_ratio": 0.1, "map_rank": 2.0}
COLLAPSED |= {"qk_rank_ratio": 0.2}
Heads = Mapping[tuple[int, int], Mapping[str, float]]


def sample(step: int, heads: Heads | None = None, layers: int = 4, width: int = 4, **every: float) -> Sample:
    """All heads healthy with the changes of `every`, single ones as given in `heads`; what is not given is NaN."""
    values = np.full((len(METRICS), layers, width), NAN, dtype=np.float32)
    for m, metric in enumerate(METRICS):
        values[m] = (HEALTHY | every).get(metric.name, NAN)
        for place, own in (heads or {}).items():
            values[m][place] = own.get(metric.name, NAN)
    names = tuple(metric.name for metric in METRICS)
    return Sample(step, 0.0, names, tuple(f"layer{i}" for i in range(layers)), values)


def covered(layers: int = 4, heads: int = 4, dtype: str = "float32", state: str = "verified") -> list[Coverage]:
    return [Coverage(f"layer{i}", state, heads, heads, 64, dtype=dtype) for i in range(layers)]


def told(engine: Engine, samples: Sequence[Sample], coverage: Sequence[Coverage] | None = None) -> list[str]:
    """What changed, one "step rule place state" for each."""
    known = covered() if coverage is None else coverage
    changes = [(s.step, alert) for s in samples for alert in engine.on_sample(s, known, {})]
    return [f"{step} {alert.rule} {alert.place} {alert.state}" for step, alert in changes]
