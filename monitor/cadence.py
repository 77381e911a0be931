"""When to sample: every `every`-th step, or as rarely as a budget asks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import fmean, median
from typing import NamedTuple

REMEMBERED = 100
"""Newest unsampled steps that tell how long a step is."""

PAUSES = 50
"""Of so many the longest one is left out: a pause for an evaluation is no step."""

GROWTH = 10
"""The interval becomes at most so many times longer at once: the few steps of a beginning may be unlike the others."""

SPARSE = 100
"""Steps. Rules hold for three samples and lead by some 300 steps: a longer interval sees a collapse late or never."""

TOO_SPARSE = (
    f"a sample costs so much that more than {SPARSE} steps pass from one to the next, too many for the rules to see a "
    "collapse in time; raise budget=, or lower rows= and sequences="
)


class Change(NamedTuple):
    """The interval in force from now on, in steps, and the share of the training time that it costs."""

    interval: int
    share: float


class Cadence:
    """Counts finished steps and says whether the next one is sampled.

    every: steps from sample to sample. budget: the share of training time that samples may cost; the interval is then
    lengthened to keep it, and shortened again, never below `every`. cycle: samples over which costs are averaged; the
    weights are looked at in one of them, and that one costs more.
    """

    def __init__(self, every: int, budget: float | None = None, cycle: int = 5) -> None:
        self.count = 0
        self.interval = every
        self.share = math.nan  # of the training time, as of the newest sample; NaN while unknown
        self._every, self._budget = every, budget
        self._next = 0  # the count at which the next sampled step begins
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._bare: deque[float] = deque(maxlen=cycle)  # sampled steps, without what their samples took
        self._costs: deque[float] = deque(maxlen=cycle)  # of the samples
        self._beyond: deque[float] = deque(maxlen=cycle)  # what sampled steps lasted longer than those before them

    @property
    def due(self) -> bool:
        return self.count >= self._next

    @property
    def until(self) -> int:
        """Steps from now to the next sampled one."""
        return max(self._next - self.count, 0)

    def resume(self, count: int, at_once: bool = False) -> None:
        """Go on after `count` steps: the next multiple of `every` is sampled, or the next step."""
        self.count = count
        self._next = count if at_once else math.ceil(count / self._every) * self._every

    def follow(self, interval: int) -> None:
        """Right after `finish` of a sampled step: the next one comes after so many, as all ranks have agreed."""
        self._next = self.count - 1 + interval

    def finish(self, duration: float, cost: float | None) -> Change | None:
        """A step is done; what changed of the interval.

        duration: seconds since the step before was done, NaN if that is unknown. cost: seconds that the sample of this
        step took, None without one.
        """
        self.count += 1
        known = duration == duration
        if cost is None:
            self._steps += [duration] if known else []
            return None
        if known:  # never so for the first step of a process, whose sample finds and proves the layers
            self._bare.append(duration - cost)
            self._costs.append(cost)
            if self._steps:
                self._beyond.append(max(duration - cost - max(_usual(self._steps)), 0.0))
        change = self._adapt()
        self._next = self.count - 1 + self.interval
        return change

    def _adapt(self) -> Change | None:
        step, cost = self._step_time(), self._cost()
        asked = self._asked(step, cost)
        # Clocks and steps vary: that must not change the interval at every sample.
        changed = asked != self.interval and (asked == self._every or abs(asked - self.interval) > 0.2 * self.interval)
        self.interval = asked if changed else self.interval
        whole = cost + self.interval * step
        self.share = cost / whole if whole > 0 else math.nan
        return Change(self.interval, self.share) if changed else None

    def _asked(self, step: float, cost: float) -> int:
        """Steps from sample to sample that the budget asks for."""
        if self._budget is None or not cost > 0 or not step > 0:
            return self.interval
        return max(self._every, min(math.ceil(cost / step * (1 / self._budget - 1)), GROWTH * self.interval))

    def _step_time(self) -> float:
        """Seconds of a step without a sample."""
        steps = self._steps or self._bare
        return fmean(_usual(steps)) if steps else math.nan

    def _cost(self) -> float:
        """Seconds of a sample: the mean of what they took, and what a sampled step lasts beyond that: it may run
        eagerly where others run compiled."""
        if not self._costs:
            return math.nan
        return fmean(self._costs) + (median(self._beyond) if self._beyond else 0.0)


def _usual(steps: Collection[float]) -> list[float]:
    """Without the longest, at least one of which is left out."""
    return sorted(steps)[: -math.ceil(len(steps) / PAUSES)] or list(steps)
