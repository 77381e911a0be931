"""Single numbers as predictors: predictors.toml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from attnwatch.monitor.rules import Rule, load_rules


class Crossing(NamedTuple):
    """When a number had been past its line in a quarter of the heads for three samples in a row (`step`, else None).

    measured: whether the run knows the number at all. from_start: it was past its line when it was first measured.
    """

    name: str
    step: int | None
    line: str
    measured: bool
    from_start: bool


@cache
def predictors() -> tuple[Rule, ...]:
    return load_rules(Path(__file__).with_name("predictors.toml"))
