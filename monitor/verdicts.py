"""One rule at work: what a sample says of every place of it, and the lives of its alerts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert, Life, Wording, advance
from attnwatch.monitor.conditions import Truth
from attnwatch.monitor.events import alert_of
from attnwatch.monitor.history import Array, Heads
from attnwatch.monitor.sample import SCALARS, UsageError
from attnwatch.monitor.state import State, freeze_alert

if TYPE_CHECKING:
    from attnwatch.monitor.rules import Rule

_MOST_ALERTS = 64  # of one rule at a time: a rule over heads may hold in thousands of them
_MOST_HEADS = 8  # that one alert names

_Place = tuple[int, int]
"""Where a share is counted: an index into `[1, 1]` (scope model), `[L, 1]` (layer) or `[L, H]` (head)."""
_AXES: dict[str, tuple[int, ...]] = {"model": (0, 1), "layer": (1,), "head": ()}
_ONE = np.ones((1, 1), dtype=bool)
_BEYOND: _Place = (-1, -1)  # stands for all places beyond the most that are named one by one


class _Tally(NamedTuple):
    """In how many heads of each place a condition holds: bad `[L, H]`, the others with an entry for each place."""

    bad: NDArray[np.bool_]
    known: NDArray[np.int64]
    share: Array
    met: NDArray[np.bool_]


def _tally(bad: NDArray[np.bool_], known: NDArray[np.bool_], rule: Rule) -> _Tally:
    count, of = _count(bad, rule.scope), _count(known, rule.scope)
    share = count / np.maximum(of, 1)
    return _Tally(bad, of, share, (count > 0) & (share >= rule.share))


def _known(truth: Truth, exist: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return exist if truth.dtype == bool else exist & ~np.isnan(truth)


def _count(heads: NDArray[np.bool_], scope: str) -> NDArray[np.int64]:
    if scope == "model":
        return np.array([[np.count_nonzero(heads)]])
    return np.asarray(heads.sum(axis=_AXES[scope], keepdims=True))


class Watch:
    """One rule at work: its conditions with their past, and the lives of its alerts by place."""

    def __init__(self, rule: Rule, of_a_head: Sequence[str], of_the_model: Sequence[str]) -> None:
        """of_a_head, of_the_model: the names that exist, by what they say something of. Raises UsageError."""
        self.rule = rule
        self._conditions = rule.conditions([*of_a_head, *of_the_model])
        self.names = tuple(dict.fromkeys(name for c in self._conditions.values() for name in c.names))
        self.scalars_only = all(name in SCALARS or name.startswith("scalar.") for name in self.names)
        self.scalars = frozenset(name.removeprefix("scalar.") for name in self.names)
        self._per_head = not set(self.names).isdisjoint(of_a_head)
        if not self.names:
            raise rule.wrong("when", f"expected the name of something measured, found {rule.when[:40]!r}")
        if not self._per_head and rule.scope != "model":
            raise rule.wrong("scope", f"expected model, as it asks nothing of a head, found {rule.scope}")
        self._summary = self._wording("summary", rule.summary or rule.when)
        self._advice = self._wording("advice", rule.advice)
        self._lives: dict[_Place, Life] = {}

    def _wording(self, key: str, text: str) -> Wording:
        words = {"place": "", "share": 0.0, "count": 0, "heads": "", "worst": "", "step": 0, "pending_step": 0}
        try:
            return Wording(text, words | dict.fromkeys(self.names, 0.0))
        except UsageError as error:
            raise self.rule.wrong(key, str(error)) from None

    def ask(self, step: int, values: Mapping[str, Array], heads: Heads) -> list[Alert]:
        """Takes in one sample (or the scalars of one step); the alerts whose state changed."""
        with np.errstate(all="ignore"):
            truths = {key: condition.evaluate(values) for key, condition in self._conditions.items()}
        met = {key: truth if truth.dtype == bool else truth == 1 for key, truth in truths.items()}
        spared = met.pop("unless", None)
        if not self._lives and not any(map(np.count_nonzero, met.values())):
            return []
        exist = heads.exist if self._per_head else _ONE
        counting = exist if spared is None else exist & ~spared
        tallies = {
            key: _tally(bad & counting, _known(truths[key], exist), self.rule)
            for key, bad in met.items()
            if key == "when" or np.count_nonzero(bad)
        }
        if not self._lives and not any(np.count_nonzero(tally.met) for tally in tallies.values()):
            return []
        return self._judge(step, tallies["when"], tallies.get("at_once"), values, heads.layers)

    def _judge(
        self,
        step: int,
        when: _Tally,
        once: _Tally | None,
        values: Mapping[str, Array],
        layers: Sequence[str],
    ) -> list[Alert]:
        bad, known, share, met = when
        decided, at_once = known > 0, np.zeros(met.shape, bool)
        if once is not None:  # then it carries the verdict of the places where it is met
            at_once = once.met
            bad, share = np.where(at_once, once.bad, bad), np.where(at_once, once.share, share)
            decided, met = decided | at_once, met | at_once

        def see(places: Sequence[_Place], pending_step: int) -> Alert:
            here = np.zeros_like(met)
            for place in places:
                here[place] = True
            return self._record(step, pending_step, float(share[places[0]]), bad & here, values, layers)

        def see_beyond(places: Sequence[_Place], pending_step: int) -> Alert:
            summary = f"{len(places)} more places than the {_MOST_ALERTS} named one by one: {self.rule.when}"
            share = float(len(places) / np.count_nonzero(decided))  # numpy's count makes it a scalar of its own
            return replace(see(places, pending_step), place="model", share=share, summary=summary)

        named, beyond = self._places(met)
        changed = []
        for place in named:
            verdict = bool(met[place]) if decided[place] else None
            changed += self._advance(place, verdict, step, bool(at_once[place]), partial(see, [place]))
        if beyond or _BEYOND in self._lives:
            verdict = bool(beyond) if decided.any() else None
            soon = any(at_once[place] for place in beyond)
            changed += self._advance(_BEYOND, verdict, step, soon, partial(see_beyond, beyond))
        return changed

    def state(self) -> State:
        """What its conditions remember, and the lives of its alerts."""
        lives = [
            {"at": list(place), "streak": life.streak, "alert": freeze_alert(life.alert)}
            for place, life in self._lives.items()
        ]
        return {"past": {key: condition.state() for key, condition in self._conditions.items()}, "lives": lives}

    def restore(self, state: State, heads: Heads) -> None:
        """Raises KeyError, OverflowError, TypeError or ValueError for what is no state of this rule about `heads`."""
        for key, condition in self._conditions.items():
            condition.restore(state["past"][key])
        rows, columns = (1 if axis in _AXES[self.rule.scope] else n for axis, n in enumerate(heads.exist.shape))
        for life in state["lives"]:
            row, column = map(int, life["at"])
            if (row, column) != _BEYOND and not (0 <= row < rows and 0 <= column < columns):
                raise ValueError(f"an alert at {life['at']}")
            self._lives[row, column] = Life(alert_of(life["alert"]), int(life["streak"]))

    def _places(self, met: NDArray[np.bool_]) -> tuple[list[_Place], list[_Place]]:
        """Those with an alert or about to have one, and those met for which there is no room."""
        live = [place for place in self._lives if place != _BEYOND]
        rows, columns = met.nonzero()
        new = [place for place in zip(rows.tolist(), columns.tolist(), strict=True) if place not in self._lives]
        room = _MOST_ALERTS - len(live)
        return sorted(live + new[:room]), new[room:]

    def _advance(
        self, place: _Place, verdict: bool | None, step: int, at_once: bool, see: Callable[[int], Alert]
    ) -> list[Alert]:
        old = self._lives.get(place)
        new = advance(old, verdict, step, hold=1 if at_once else self.rule.hold, keep=self.rule.keep, see=see)
        if new is None:
            return []
        self._lives[place] = new
        if new.alert.state == "resolved":
            del self._lives[place]
        return [new.alert] if old is None or old.alert.state != new.alert.state else []

    def _record(
        self,
        step: int,
        pending_step: int,
        share: float,
        bad: NDArray[np.bool_],
        values: Mapping[str, Array],
        layers: Sequence[str],
    ) -> Alert:
        """A pending alert with the evidence of now: the bad heads, those furthest past the first comparison first."""
        rows, columns = np.nonzero(bad)
        distance = np.broadcast_to(self._conditions["when"].distance(), bad.shape)[rows, columns]
        order = np.argsort(-np.nan_to_num(distance, nan=-1.0), kind="stable")
        worst = rows[order[0]], columns[order[0]]
        evidence = {name: float(np.broadcast_to(values[name], bad.shape)[worst]) for name in self.names}
        heads = [(layers[rows[i]], int(columns[i])) for i in order[:_MOST_HEADS]] if self._per_head else []
        titles = [f"{layer}/{head}" for layer, head in heads] or ["model"]
        title = {"model": "model", "layer": heads[0][0] if heads else "model", "head": titles[0]}[self.rule.scope]
        words: dict[str, object] = {
            **evidence,
            "place": title,
            "share": share,
            "count": len(order),
            "heads": ", ".join(titles),
            "worst": titles[0],
            "step": step,
            "pending_step": pending_step,
        }
        return Alert(
            rule=self.rule.name,
            severity=self.rule.severity,
            state="pending",
            place=title,
            pending_step=pending_step,
            fired_step=None,
            resolved_step=None,
            share=share,
            heads=tuple(heads),
            values=evidence,
            summary=self._summary.fill(words),
            advice=self._advice.fill(words),
        )
