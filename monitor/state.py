"""What the engine remembers, as plain data that JSON and torch.save can hold, and back. Missing (NaN) is None."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.sample import UsageError

State = dict[str, Any]
"""Only dicts with text as keys, lists, text, whole numbers, finite floats and None."""


def freeze(array: NDArray[Any]) -> State:
    """Any array of numbers none of which is infinite."""
    return {"shape": list(array.shape), "values": [None if x != x else x for x in array.ravel().tolist()]}


def thaw(state: State) -> NDArray[np.float64]:
    """The array as float64. Raises KeyError, TypeError or ValueError for what is none."""
    return np.array(state["values"], dtype=np.float64).reshape(state["shape"])


def freeze_number(value: float) -> float | str | None:
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)


def thaw_number(state: float | str | None) -> float:
    return math.nan if state is None else float(state)


def freeze_numbers(values: Mapping[str, float]) -> State:
    return {name: freeze_number(float(value)) for name, value in values.items()}


def thaw_numbers(state: State) -> dict[str, float]:
    return {name: thaw_number(value) for name, value in state.items()}


def freeze_alert(alert: Alert) -> State:
    """What `events.alert_of` reads."""
    heads = [list(head) for head in alert.heads]
    return {**asdict(alert), "heads": heads, "values": freeze_numbers(alert.values)}


class Counts(NamedTuple):
    """How far a run has come. step: the newest finished one, -1 before the first. finished: steps while watched.

    seconds: cost of the samples."""

    step: int
    finished: int
    samples: int
    seconds: float


def thaw_counts(state: Mapping[str, Any]) -> Counts:
    """The counts in the state of a monitor. Raises UsageError for what is none."""
    try:
        counts = Counts(**state["counts"])
        numbers = (operator.index(counts.step), operator.index(counts.finished), operator.index(counts.samples))
        if min(numbers) < -1 or not isinstance(state["engine"], Mapping):
            raise ValueError
        return Counts(*numbers, float(counts.seconds))
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"expected what monitor.state_dict() gave, found {' '.join(repr(state)[:60].split())}; pass that, or go on "
            "without it"
        ) from None
