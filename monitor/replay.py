"""Rules over stored runs: what would have fired when, and how that differs from what did.

A replay feeds the engine as the monitor does: of a step first its sample, then its scalars. With the rules of the run
it gives the very alerts that the run recorded. Where step numbers go back or come twice, as when a trainer
counts from 0 in every epoch, the files no longer say what came between what: samples then come in order of step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

import numpy as np

from attnwatch.monitor import leads as measured
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Engine, Rule, load_rules, parse_rules
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage, Sample, UsageError

Look = Callable[[Sample], object]


@dataclass(frozen=True)
class Replay:
    """What rules say of a stored run.

    alerts: as the engine ends with them: those that are pending, firing or resolved, oldest first. divergence: the
    step at which the loss began to diverge, by the `loss_divergence` of the rules or, if they have none, the default
    one. leads: by rule, steps from its first warning that stood at the divergence to that step (monitor/leads.py).
    """

    alerts: tuple[Alert, ...]
    divergence: int | None
    leads: dict[str, int]

    @property
    def lead(self) -> int | None:
        """The longest one; above 0 the divergence was detected."""
        return max(self.leads.values(), default=None)


def rules_of(run: Run) -> tuple[Rule, ...]:
    """The rules that were in force. Raises UsageError for what this version does not know."""
    try:
        return parse_rules(run.rules)
    except UsageError as error:
        raise UsageError(f"run {str(run.path)!r}: {error}; give rules of your own") from None


def replay(run: Run, rules: Sequence[Rule], look: Look | None = None) -> Replay:
    """Asks the rules of a whole run. look: is shown every sample on the way.

    A run that resumed another one goes on from the state it began with if these are the rules it had; other rules know
    nothing of what was before. Raises UsageError when a rule names what the run did not record.
    """
    try:
        engine = Engine(rules, run.metrics)
        if run.resumed is not None and run.resumed.get("rules") == [asdict(rule) for rule in rules]:
            engine = engine.resumed(run.resumed)
    except UsageError as error:
        raise UsageError(f"run {str(run.path)!r}: {error}") from None
    engines, judge = [engine], engine
    if measured.DIVERGENCE not in {rule.name for rule in rules}:
        judge = Engine([rule for rule in load_rules() if rule.name == measured.DIVERGENCE], run.metrics)
        engines.append(judge)
    drive(run, engines, look)
    start = measured.onset(judge.alerts)
    return Replay(engine.alerts, start, measured.leads(engine.alerts, start))


def drive(run: Run, engines: Sequence[Engine], look: Look | None = None) -> None:
    """Feeds a run to engines. Raises UsageError for a thinned one."""
    if run.is_thinned:
        raise UsageError(
            f"expected a run with all its samples, found {str(run.path)!r} thinned: rules count samples; "
            "replay the run that it was made of"
        )
    scalars, coverages = run.iter_scalars(), iter(run.coverages)
    coverage: tuple[Coverage, ...] = ()
    line, news = next(scalars, None), next(coverages, None)
    for sample in heapq.merge(run.iter_samples(), _blanks(run), key=lambda sample: sample.step):
        while line is not None and line[0] < sample.step:
            for engine in engines:
                engine.on_scalars(*line)
            line = next(scalars, None)
        while news is not None and news[0] <= sample.step:
            coverage, news = news[1], next(coverages, None)
        for engine in engines:
            engine.on_sample(sample, coverage, {})
        if look is not None:
            look(sample)
    while line is not None:
        for engine in engines:
            engine.on_scalars(*line)
        line = next(scalars, None)


def _blanks(run: Run) -> Iterator[Sample]:
    """The samples that gave nothing: the engine was asked about the coverage all the same."""
    metrics = tuple(metric.name for metric in run.metrics)
    for step in run.unmeasured:
        yield Sample(step, np.nan, metrics, (), np.empty((len(metrics), 0, 0), np.float32))


class Change(NamedTuple):
    """One alert in two replays: the step at which it fired in each, None where it did not."""

    rule: str
    place: str
    before: int | None
    now: int | None


def changes(before: Iterable[Alert], now: Iterable[Alert]) -> list[Change]:
    """Where two replays differ, by step: the n-th alert of a rule at a place is compared with its n-th."""
    sides = [_steps(before), _steps(now)]
    found = [
        Change(*key, then, after)
        for key in {**sides[0], **sides[1]}
        for then, after in zip_longest(*(side.get(key, []) for side in sides))
        if then != after
    ]
    return sorted(found, key=lambda change: min(step for step in change[2:] if step is not None))


def _steps(alerts: Iterable[Alert]) -> dict[tuple[str, str], list[int]]:
    steps: dict[tuple[str, str], list[int]] = {}
    for alert in measured.fired(alerts):
        steps.setdefault((alert.rule, alert.place), []).append(alert.fired_step or 0)
    return steps


class Outcome(NamedTuple):
    """What one replay says of one rule, or of all: lead None without a divergence or a standing warning."""

    diverged: bool
    lead: int | None
    warned: bool

    @classmethod
    def of(cls, replayed: Replay) -> Outcome:
        return cls(replayed.divergence is not None, replayed.lead, bool(measured.warnings(replayed.alerts)))


class Score(NamedTuple):
    """Counts of runs. detected: diverged, and a warning about attention fired before and still stood.

    alarmed: of the `others`, which did not diverge, those with a warning. A collapse whose loss only gets worse is one
    of these, so it is false only where nothing was wrong. median, least: of the leads of the detected runs, in steps.
    """

    diverged: int
    detected: int
    others: int
    alarmed: int
    median: float | None
    least: int | None


def score(outcomes: Iterable[Outcome]) -> Score:
    known = list(outcomes)
    ahead = [outcome.lead for outcome in known if outcome.lead is not None and outcome.lead > 0]
    others = [outcome for outcome in known if not outcome.diverged]
    return Score(
        diverged=len(known) - len(others),
        detected=len(ahead),
        others=len(others),
        alarmed=sum(outcome.warned for outcome in others),
        median=median(ahead) if ahead else None,
        least=min(ahead, default=None),
    )
