"""When to sample: every `every`-th step, or as rarely as a budget asks."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median
from typing import NamedTuple

REMEMBERED = 20
"""Durations of unsampled steps of which the median is the step time: a pause for an evaluation is none."""

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
        self._every, self._budget = every, budget
        self._next = 0  # the count at which the next sampled step begins
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._sampled: deque[tuple[float, float]] = deque(maxlen=cycle)  # duration and cost of the newest

    @property
    def due(self) -> bool:
        return self.count >= self._next

    @property
    def until(self) -> int:
        """Steps from now to the next sampled one."""
        return max(self._next - self.count, 0)

    @property
    def share(self) -> float:
        """Of the training time; NaN while unknown."""
        step = self._step_time()
        cost = self._cost(step)
        whole = cost + self.interval * step
        return cost / whole if whole > 0 else math.nan

    def resume(self, count: int) -> None:
        """Go on after `count` steps: the next multiple of `every` is sampled."""
        self.count = count
        self._next = math.ceil(count / self._every) * self._every

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
            self._sampled.append((duration, cost))
        change = self._adapt()
        self._next = self.count - 1 + self.interval
        return change

    def _adapt(self) -> Change | None:
        step = self._step_time()
        cost = self._cost(step)
        if self._budget is None or not cost > 0 or not step > 0:
            return None
        asked = max(self._every, math.ceil(cost / step * (1 / self._budget - 1)))
        # Clocks and steps vary: that must not change the interval at every sample.
        if asked == self.interval or (asked > self._every and abs(asked - self.interval) <= 0.2 * self.interval):
            return None
        self.interval = asked
        return Change(asked, self.share)

    def _step_time(self) -> float:
        """Seconds of a step without a sample."""
        steps = list(self._steps) or [duration - cost for duration, cost in self._sampled]
        return median(steps) if steps else math.nan

    def _cost(self, step: float) -> float:
        """Seconds of a sample: the mean of what they took, and what a sampled step lasts beyond that: it may run
        eagerly where others run compiled."""
        if not self._sampled:
            return math.nan
        beyond = median(duration - cost for duration, cost in self._sampled) - step
        return fmean(cost for _, cost in self._sampled) + max(beyond, 0.0)
