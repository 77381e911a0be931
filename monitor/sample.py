"""The plain types that pass between the rooms. Numbers only: nothing here knows of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attnwatch.monitor.alerts import Alert

SCALARS = ("loss", "grad_norm", "lr")
"""Scalars that rules may name without having seen them; any other one is written `scalar.NAME`."""


class UsageError(ValueError):
    """Wrong use or unreadable input. The message is one line: what was expected, what was found, what to do."""


@dataclass(frozen=True)
class Metric:
    """What one number of a head means. `merge` says how two measurements of one head become one.

    merge: "mean" (row-weighted), "max", "min", "sum" (count), or "last" (from the weights: known
    until measured again, or until the layer is no longer verified).
    """

    name: str
    unit: str
    help: str
    merge: str


@dataclass(frozen=True)
class Coverage:
    """How surely one attention layer is seen.

    state: "verified" (logits and weights proved against the layer's own output and projections), "logits_only"
    (logits seen, W_q and W_k not proved: no spectrum), "uncovered" (nothing is known of this layer).
    heads, kv_heads, head_dim: 0 while unknown. qk_norm: kind of query-key norm, "" for none.
    dtype: what the attention is computed in ("bfloat16"), "" while unknown.
    """

    name: str
    state: str
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    qk_norm: str = ""
    note: str = ""
    dtype: str = ""


def unproved(coverage: Iterable[Coverage]) -> frozenset[str]:
    """Layers whose weights were looked at and not proved: what was known of their spectrum holds no more."""
    return frozenset(layer.name for layer in coverage if layer.state != "verified")


@dataclass(frozen=True, eq=False)
class Sample:
    """Every head's numbers at one sampled step.

    values: float32 `[M, L, H]`, metrics x layers x heads (the widest layer's), NaN where not measured; a layer-wide
    metric has the same value at each of its heads. time: unix seconds. seconds: what taking this sample cost.
    """

    step: int
    time: float
    metrics: tuple[str, ...]
    layers: tuple[str, ...]
    values: NDArray[np.float32]
    seconds: float = 0.0

    def __getitem__(self, metric: str) -> NDArray[np.float32]:
        """`[L, H]` of one metric. Raises KeyError with the names that exist."""
        if metric not in self.metrics:
            raise KeyError(f"no metric {metric!r}; there are: {', '.join(self.metrics)}")
        values: NDArray[np.float32] = self.values[self.metrics.index(metric)]
        return values


@dataclass(frozen=True)
class Problem:
    """A part of the watching that does not work (training goes on): `where` is a layer, an output or a file."""

    step: int
    where: str
    text: str


@dataclass(frozen=True)
class Update:
    """What every output is told after a step: the newest sample and all that is known beside it.

    sample: the newest one, None before the first. is_new: whether it was taken at this step. scalars: the newest
    value of each. changed: alerts whose state changed at this step. seconds: cost of all samples so far. run: the run
    directory; its report is there when the outputs are closed. interval: steps from sample to sample, as it is now.
    share: of the training time, what samples cost at that interval; NaN while unknown.
    """

    step: int
    sample: Sample | None
    is_new: bool
    scalars: Mapping[str, float]
    alerts: tuple[Alert, ...]
    changed: tuple[Alert, ...]
    coverage: tuple[Coverage, ...]
    problems: tuple[Problem, ...]
    samples: int
    seconds: float
    run: Path = Path()
    interval: int = 0
    share: float = math.nan
