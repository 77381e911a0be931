"""Rules are data: what to ask of every head, of how many, for how long, and what to tell whoever trains."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from attnwatch.monitor.alerts import SEVERITIES, Alert
from attnwatch.monitor.conditions import Condition, closest, parse
from attnwatch.monitor.events import alert_of
from attnwatch.monitor.history import Array, Heads
from attnwatch.monitor.sample import SCALARS, Coverage, Metric, Sample, UsageError, unproved
from attnwatch.monitor.state import State, freeze_alert, freeze_numbers, thaw_numbers
from attnwatch.monitor.verdicts import Watch

SCOPES = ("head", "layer", "model")
LAYER_FACTS = ("heads", "kv_heads", "head_dim", "dtype_eps", "dtype_max")
"""Names of what is known of a layer. dtype_eps: relative spacing of its dtype's numbers; dtype_max: the largest."""
SAMPLE_FACTS = ("measured_layers", "logits_only_layers", "uncovered_layers")
"""Names of how many layers are how surely seen; measured is both verified and logits only."""

_DTYPES = {
    "float16": (2.0**-10, 65504.0),
    "bfloat16": (2.0**-7, 3.39e38),
    "float32": (2.0**-23, 3.4e38),
    "float64": (2.0**-52, 1.79e308),
}
_UNKNOWN = (np.nan, np.nan)
_CONDITIONS = ("when", "unless", "at_once")


@dataclass(frozen=True)
class Rule:
    """One rule. A wrong value raises UsageError with the rule and the key; Engine checks the names in conditions.

    when: asked of every head. unless: heads it does not count. at_once: fires without waiting for `hold`.
    scope: "head", "layer" or "model", where the share is counted and what the alert names.
    share: of the heads of the scope of which the answer is known; 0: one head is enough.
    hold, keep: met samples in a row until it fires, quiet ones in a row until it resolves; steps that passed its
    scalars instead of samples, if it names nothing else.
    summary, advice: text with `{place} {share} {count} {heads} {worst} {step} {pending_step}` and any name the
    conditions use, such as `{entropy_ratio:.2f}`. An empty summary is the condition itself.
    """

    name: str
    severity: str
    when: str
    unless: str | None = None
    at_once: str | None = None
    scope: str = "model"
    share: float = 0.25
    hold: int = 1
    keep: int = 5
    summary: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        def is_count(value: object) -> bool:
            return type(value) is int and value >= 1

        share_is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        name_is_plain = isinstance(self.name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", self.name)
        for key, valid, expected in (
            ("name", name_is_plain, "a short name of letters, digits, '_', '-' and '.'"),
            ("severity", self.severity in SEVERITIES, "info, warning or critical"),
            ("when", isinstance(self.when, str), "a condition as text"),
            ("unless", isinstance(self.unless, str | None), "a condition as text"),
            ("at_once", isinstance(self.at_once, str | None), "a condition as text"),
            ("scope", self.scope in SCOPES, "head, layer or model"),
            ("share", share_is_number and 0 <= self.share <= 1, "a number from 0 (one head is enough) to 1"),
            ("hold", is_count(self.hold), "a whole number of samples, at least 1"),
            ("keep", is_count(self.keep), "a whole number of samples, at least 1"),
            ("summary", isinstance(self.summary, str), "text"),
            ("advice", isinstance(self.advice, str), "text"),
        ):
            if not valid:
                raise self.wrong(key, f"expected {expected}, found {repr(getattr(self, key))[:60]}")
        self.conditions(None)

    def conditions(self, names: Iterable[str] | None) -> dict[str, Condition]:
        """Its conditions by key, parsed afresh: with no past. names: those that exist, None for any."""
        known = None if names is None else frozenset(names)
        parsed = {}
        for key in _CONDITIONS:
            text = getattr(self, key)
            if text is None:
                continue
            try:
                parsed[key] = parse(text, known)
            except UsageError as error:
                raise self.wrong(key, str(error)) from None
        return parsed

    def wrong(self, key: str, text: str) -> UsageError:
        """What to raise about one of its keys."""
        return UsageError(f"rule {repr(self.name)[:80]}, {key}: {text}")


def load_rules(source: str | os.PathLike[str] | None = None) -> tuple[Rule, ...]:
    """The rules of a TOML file; None: those packaged here. Raises UsageError with file, rule and key."""
    path = Path(__file__).with_name("default_rules.toml") if source is None else Path(source)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: expected a file of rules, found {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{path}: expected [[rule]] tables, found TOML nested too deeply") from None
    except ValueError as error:  # not UTF-8, or not TOML: then with line and column
        raise UsageError(f"{path}: expected TOML, found {' '.join(str(error).split())}") from None
    tables = content.get("rule")
    if set(content) != {"rule"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        found = ", ".join(map(repr, content))[:80] or "nothing"
        raise UsageError(f"{path}: expected [[rule]] tables and nothing else at the top, found {found}")
    with of_file(path):
        return parse_rules(tables)


@contextmanager
def of_file(file: str | os.PathLike[str] | None) -> Iterator[None]:
    """A UsageError about rules names the file that they came from; None: from none."""
    try:
        yield
    except UsageError as error:
        if file is None:
            raise
        raise UsageError(f"{file}: {error}") from None


def parse_rules(tables: Iterable[Mapping[str, object]]) -> tuple[Rule, ...]:
    """Rules from plain data, as a TOML file or run.json has it. Raises UsageError with rule and key."""
    rules = tuple(_rule(number, table) for number, table in enumerate(tables, 1))
    _must_differ(rules)
    return rules


def _rule(number: int, table: Mapping[str, object]) -> Rule:
    keys = {field.name: field.default is MISSING for field in fields(Rule)}
    title = f"rule {repr(table['name'])[:80]}" if "name" in table else f"rule number {number}"
    for key in table:
        if key not in keys:
            raise UsageError(
                f"{title}: no key {key[:40]!r}; there are (closest first): {', '.join(closest(key, keys))}"
            )
    missing = [key for key, required in keys.items() if required and key not in table]
    if missing:
        raise UsageError(f"{title}: expected a key {missing[0]!r}, found {', '.join(table) or 'none'}")
    return Rule(**table)  # type: ignore[arg-type]  # checked by Rule itself


def _must_differ(rules: Sequence[Rule]) -> None:
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"rule {name!r}: expected different names, found it {names.count(name)} times; rename one")


class Engine:
    """Asks the rules of every sample and every step, and keeps the alerts. Deterministic: a replay gives the same."""

    def __init__(self, rules: Sequence[Rule], metrics: Sequence[Metric]) -> None:
        """Raises UsageError with rule, key and, for a wrong name in a condition, column and the names that exist."""
        _must_differ(rules)
        self._rules, self._metrics = tuple(rules), tuple(metrics)
        of_a_head = [*(metric.name for metric in metrics), *LAYER_FACTS]
        self._watches = [Watch(rule, of_a_head, [*SAMPLE_FACTS, *SCALARS]) for rule in rules]
        self._asked: dict[tuple[str, ...], list[Watch]] = {}  # by the scalars that a step passed
        self._heads = Heads(metrics)
        self._scalars: dict[str, float] = {}
        self._alerts: dict[tuple[str, str, int], Alert] = {}
        self._facts: tuple[object, dict[str, Array]] = (None, {})  # of which layers and coverage, and what they are

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All that are pending, firing or resolved, oldest first."""
        return tuple(self._alerts.values())

    def on_sample(
        self, sample: Sample, coverage: Sequence[Coverage], scalars: Mapping[str, float]
    ) -> tuple[Alert, ...]:
        """Takes in one sample; the alerts whose state changed. scalars: the last known ones."""
        self._scalars |= scalars
        self._heads.take(sample, unproved(coverage))
        values = self._heads.values | self._facts_of(coverage)
        watches = [watch for watch in self._watches if not watch.scalars_only]
        return self._ask(watches, sample.step, values)

    def on_scalars(self, step: int, scalars: Mapping[str, float]) -> tuple[Alert, ...]:
        """Takes in what a step passed: asks the rules that name scalars only, and one of these."""
        self._scalars |= scalars
        passed = tuple(scalars)
        if passed not in self._asked:
            of_scalars = (watch for watch in self._watches if watch.scalars_only)
            self._asked[passed] = [watch for watch in of_scalars if not watch.scalars.isdisjoint(passed)]
        return self._ask(self._asked[passed], step, {})

    @property
    def scalars(self) -> dict[str, float]:
        """The newest value of each."""
        return dict(self._scalars)

    def state_dict(self) -> State:
        """All that it remembers, as plain data, with the rules and metrics that it is about."""
        return {
            "rules": [asdict(rule) for rule in self._rules],
            "metrics": [{"name": metric.name, "merge": metric.merge} for metric in self._metrics],
            "heads": self._heads.state(),
            "scalars": freeze_numbers(self._scalars),
            "alerts": [freeze_alert(alert) for alert in self.alerts],
            "watches": [watch.state() for watch in self._watches],
        }

    def resumed(self, state: Mapping[str, Any]) -> Engine:
        """An engine of the same rules and metrics that goes on from a state. Raises UsageError: what differs."""
        engine = Engine(self._rules, self._metrics)
        fresh = engine.state_dict()
        try:
            for kind in ("rules", "metrics"):
                _must_agree(kind, state[kind], fresh[kind])
            engine._heads.restore(state["heads"])
            engine._scalars = thaw_numbers(state["scalars"])
            alerts = [alert_of(alert) for alert in state["alerts"]]
            engine._alerts = {(alert.rule, alert.place, alert.pending_step): alert for alert in alerts}
            for watch, remembered in zip(engine._watches, state["watches"], strict=True):
                watch.restore(remembered, engine._heads)
        except UsageError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise UsageError(f"expected what state_dict() gave, found a state that cannot be read ({found})") from None
        return engine

    def _facts_of(self, coverage: Sequence[Coverage]) -> dict[str, Array]:
        known = (tuple(coverage), len(self._heads.layers))
        if known != self._facts[0]:
            self._facts = known, _layer_facts(self._heads.layers, coverage) | _sample_facts(coverage)
        return self._facts[1]

    def _scalar(self, name: str) -> Array:
        return np.array([[self._scalars.get(name.removeprefix("scalar."), np.nan)]])

    def _ask(self, watches: Sequence[Watch], step: int, values: Mapping[str, Array]) -> tuple[Alert, ...]:
        changed = []
        for watch in watches:
            known = {n: values[n] if n in values else self._scalar(n) for n in watch.names}
            changed += watch.ask(step, known, self._heads)
        for alert in changed:
            key = (alert.rule, alert.place, alert.pending_step)
            self._alerts[key] = alert
            if alert.state == "resolved" and alert.fired_step is None:
                del self._alerts[key]
        return tuple(changed)


def _must_agree(kind: str, saved: Sequence[Mapping[str, object]], ours: Sequence[Mapping[str, object]]) -> None:
    """Raises UsageError that names the rules or metrics in which a state and an engine differ."""
    if list(saved) == list(ours):
        return
    then, now = ({str(each["name"]): each for each in side} for side in (saved, ours))
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    said = [
        f"{name} ({'changed' if name in then and name in now else 'not in ' + ('it' if name in now else 'these')})"
        for name in names
    ]
    raise UsageError(
        f"expected a state of these {kind}, found one that differs in {', '.join(said[:8]) or 'their order'}; "
        "watch with those that it was saved with, or go on without it"
    )


def _layer_facts(layers: Sequence[str], coverage: Sequence[Coverage]) -> dict[str, Array]:
    """`[L, 1]` of each of LAYER_FACTS."""
    of = {
        c.name: (*(n or np.nan for n in (c.heads, c.kv_heads, c.head_dim)), *_DTYPES.get(c.dtype, _UNKNOWN))
        for c in coverage
    }
    table = np.array([of.get(layer, (np.nan,) * 5) for layer in layers], dtype=np.float64).reshape(-1, 5)
    return {name: table[:, i : i + 1] for i, name in enumerate(LAYER_FACTS)}


def _sample_facts(coverage: Sequence[Coverage]) -> dict[str, Array]:
    states = [c.state for c in coverage]
    logits_only, uncovered = states.count("logits_only"), states.count("uncovered")
    counts = (len(states) - uncovered, logits_only, uncovered)
    return {name: np.array([[float(n)]]) for name, n in zip(SAMPLE_FACTS, counts, strict=True)}
