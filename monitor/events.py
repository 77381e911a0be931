"""Lines of events.jsonl, and parts of run.json, as the types that they were written from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.sample import Coverage, Metric, Problem

Plain = TypeVar("Plain", Alert, Coverage, Metric, Problem)

_PLAIN = {"str": (str,), "int": (int,), "int | None": (int, type(None)), "float": (int, float)}
"""Types of the fields that are checked, as they are written."""


def alert_of(line: Mapping[str, Any]) -> Alert:
    """An alert as it was recorded: null stands for NaN. Raises what `plain` raises, KeyError and ValueError."""
    values = {str(name): _float(value) for name, value in line["values"].items()}
    heads = tuple((str(layer), int(head)) for layer, head in line["heads"])
    return plain(Alert, {**line, "share": _float(line["share"]), "values": values, "heads": heads})


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def plain(kind: type[Plain], line: Mapping[str, Any]) -> Plain:
    """A dataclass from its fields; what a later version may have added is left out. Raises TypeError for a value of
    another type than the field's, OverflowError for a step that no 64 bits hold."""
    known = {field.name: line[field.name] for field in fields(kind) if field.name in line}
    for field in fields(kind):
        expected, value = _PLAIN.get(str(field.type)), known.get(field.name)
        if field.name in known and expected is not None and type(value) not in expected:
            raise TypeError(f"{kind.__name__}.{field.name}: {value!r:.40}")
        if type(value) is int:
            np.int64(value)
    return kind(**known)
