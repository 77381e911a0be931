"""A run as pandas data frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.extras import need
from attnwatch.monitor.sample import UsageError

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run


def frame(run: Run, what: str) -> Any:
    """The frame of `Run.to_pandas`. Raises UsageError, and ImportError without pandas."""
    if what not in _FRAMES:
        raise UsageError(f"expected a frame of this run, found {what!r}; there are: {', '.join(_FRAMES)}")
    return _FRAMES[what](run, need("pandas", "pandas"))


def _samples(run: Run, pandas: Any) -> Any:
    count, layers, heads = len(run.steps), len(run.layers), run.heads
    layer = np.tile(np.repeat(np.arange(layers), heads), count)
    names = [metric.name for metric in run.metrics]
    wide = pandas.DataFrame(
        {
            "step": np.repeat(run.steps, layers * heads),
            "layer": pandas.Categorical.from_codes(layer, list(run.layers)),
            "head": np.tile(np.arange(heads), count * layers),
            **{name: run.metric(name).ravel() for name in names},
        }
    )
    return wide.dropna(how="all", subset=names, ignore_index=True)


def _scalars(run: Run, pandas: Any) -> Any:
    columns = {name: pandas.Series(*reversed(run.scalar(name)), name=name) for name in run.scalar_names}
    wide = pandas.DataFrame(columns).rename_axis("step").sort_index()
    wide.index = wide.index.astype(np.int64)
    return wide.reset_index()


def _alerts(run: Run, pandas: Any) -> Any:
    wide = pandas.DataFrame([asdict(alert) for alert in run.alerts], columns=[field.name for field in fields(Alert)])
    return wide.astype(dict.fromkeys(("pending_step", "fired_step", "resolved_step"), "Int64"))


_FRAMES: dict[str, Callable[[Run, Any], Any]] = {"samples": _samples, "scalars": _scalars, "alerts": _alerts}
