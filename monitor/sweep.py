"""How a threshold trades lead against false alarms: stored runs replayed with other numbers in the rules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from attnwatch.monitor.leads import DIVERGENCE, GRAVE, SEEN_APART, fired
from attnwatch.monitor.replay import Look, Outcome, Score, replay, score
from attnwatch.monitor.rules import Rule
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import UsageError
from attnwatch.monitor.tokens import compared, with_threshold

MOST_VALUES = 100
_KEYS = ("when", "unless", "at_once")


class Sweep(NamedTuple):
    """What to vary: the numbers that `metric` is compared with, all of a rule at once."""

    metric: str
    values: tuple[float, ...]


class Point(NamedTuple):
    """One rule with one value in it, and what it says of the runs."""

    rule: str
    value: float
    score: Score


def parse_sweep(text: str) -> Sweep:
    """`METRIC=a:b:n`, n values evenly from a to b. Raises UsageError."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*)=([^:]+):([^:]+):(\d{1,4})", text)
    try:
        low, high, count = float(match[2]), float(match[3]), int(match[4])  # type: ignore[index]  # None: no match
    except (TypeError, ValueError):
        low, high, count = math.nan, math.nan, 0
    if match is None or not math.isfinite(low) or not math.isfinite(high) or not 2 <= count <= MOST_VALUES:
        raise UsageError(
            f"--sweep: expected METRIC=a:b:n with 2 to {MOST_VALUES} values, such as entropy_ratio=0.1:0.5:9, "
            f"found {text[:60]!r}"
        )
    return Sweep(match[1], tuple(low + (high - low) * index / (count - 1) for index in range(count)))


def variants(rules: Sequence[Rule], sweep: Sweep) -> dict[str, tuple[Rule, float, Rule]]:
    """By the name of each varied rule: it, the value in it, the rule it was. Raises UsageError when there is none."""
    grave = [rule for rule in rules if rule.severity in GRAVE and rule.name not in SEEN_APART]
    found = {}
    for number, rule in enumerate(grave):
        texts = {key: text for key in _KEYS if (text := getattr(rule, key)) is not None}
        if not any(sweep.metric in compared(text) for text in texts.values()):
            continue
        for index, value in enumerate(sweep.values):
            named = replace(rule, name=f"varied.{number}.{index}")
            for key, text in texts.items():
                named = replace(named, **{key: with_threshold(text, sweep.metric, value)})  # type: ignore[arg-type]
            found[named.name] = (named, value, rule)
    if not found:
        names = sorted({name for rule in grave for key in _KEYS for name in compared(getattr(rule, key) or "")})
        raise UsageError(
            f"--sweep: expected a name that a rule of severity warning or critical compares with a number, found "
            f"{sweep.metric!r}; there are: {', '.join(names) or 'none'}"
        )
    return found


def run_sweep(
    runs: Iterable[Run], rules_for: Callable[[Run], Sequence[Rule]], sweep: Sweep, look: Look | None = None
) -> list[Point]:
    """One replay a run, of all variants together; by rule, then by value. rules_for: the rules to vary for a run."""
    outcomes: dict[tuple[str, float], list[Outcome]] = {}
    for run in runs:
        rules = rules_for(run)
        varied = variants(rules, sweep)
        divergence = [rule for rule in rules if rule.name == DIVERGENCE]
        replayed = replay(run, [*(rule for rule, _, _ in varied.values()), *divergence], look)
        warned = {alert.rule for alert in fired(replayed.alerts)}
        for name, (_, value, rule) in varied.items():
            outcome = Outcome(replayed.divergence is not None, replayed.leads.get(name), name in warned)
            outcomes.setdefault((rule.name, value), []).append(outcome)
    return [Point(*key, score(known)) for key, known in outcomes.items()]
