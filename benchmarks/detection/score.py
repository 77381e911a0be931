"""How a rule did: what it found, how early, and how often it cried wolf."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from benchmarks.detection.recipe import COLLAPSE, COLLAPSES, SOUND, Recipe
from benchmarks.detection.truth import Truth
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert

RESAMPLES = 1000
APART = ("loss_divergence", "uncovered_layers", "benign_sparsity")
"""Rules that claim nothing bad of the attention."""


@dataclass(frozen=True)
class Case:
    """One stored run, what became of it, and the alerts that the rules would have raised."""

    recipe: Recipe
    truth: Truth
    alerts: tuple[Alert, ...]

    @property
    def as_meant(self) -> bool:
        """A collapse may or may not go on to a divergence: small causes decide that."""
        meant = self.recipe.label
        return self.truth.label in (COLLAPSE if meant == COLLAPSES else (meant,))

    def fired(self, wanted: Callable[[Alert], bool]) -> list[Alert]:
        """Alerts that fired, first one first; none of those that say nothing any more."""
        end = self.truth.void
        found = [a for a in self.alerts if a.fired_step is not None and wanted(a)]
        return sorted((a for a in found if end is None or (a.fired_step or 0) < end), key=lambda a: a.fired_step or 0)

    def lead(self, wanted: Callable[[Alert], bool]) -> int | None:
        """Steps from the first alert still standing at the onset of divergence to that onset, as in reports/summary."""
        start = self.truth.onset
        if start is None:
            return None
        for alert in self.fired(wanted):
            if alert.resolved_step is None or alert.resolved_step >= start:
                return start - (alert.fired_step or 0)
        return None


class Score(NamedTuple):
    """found: positives with an alert, on divergent runs one before the onset. leads: of the divergent runs found.

    late: divergent runs with an alert only at the onset or after. wolf: healthy runs with an alert.
    """

    positives: int
    found: int
    late: int
    leads: tuple[int, ...]
    healthy: int
    wolf: int
    missed: tuple[str, ...]
    false: tuple[str, ...]


def score(cases: Iterable[Case], wanted: Callable[[Alert], bool], failures: Sequence[str] = COLLAPSE) -> Score:
    """failures: what became of the runs that are to be found. Runs that failed in other ways are left out."""
    positives = found = late = healthy = 0
    leads: list[int] = []
    missed: list[str] = []
    false: list[str] = []
    for case in cases:
        alerts = case.fired(wanted)
        if case.truth.label in failures:
            positives += 1
            lead = case.lead(wanted)
            if lead is not None and lead > 0:
                leads.append(lead)
            in_time = bool(alerts) if case.truth.onset is None else lead is not None and lead > 0
            found += in_time
            late += bool(alerts) and not in_time
            if not in_time:
                missed.append(case.recipe.name)
        elif case.truth.label in SOUND:
            healthy += 1
            if alerts:
                false.append(case.recipe.name)
    return Score(positives, found, late, tuple(leads), healthy, len(false), tuple(missed), tuple(false))


def by_rule(*names: str) -> Callable[[Alert], bool]:
    return lambda alert: alert.rule in names


def by_severity(*severities: str) -> Callable[[Alert], bool]:
    return lambda alert: alert.severity in severities and alert.rule not in APART


def interval(
    values: Sequence[float], statistic: Callable[[NDArray[np.float64]], float] = lambda x: float(np.median(x))
) -> tuple[float, float]:
    """95 % percentile interval over resampled runs."""
    if not values:
        return np.nan, np.nan
    draw = np.random.default_rng(0)
    sample = np.array(values, dtype=np.float64)
    drawn = [statistic(sample[draw.integers(0, len(sample), len(sample))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def share_interval(hits: int, of: int) -> tuple[float, float]:
    return interval([1.0] * hits + [0.0] * (of - hits), lambda x: float(x.mean()))
