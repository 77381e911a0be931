"""One rule at work: what a sample says of every place of it, and the lives of its alerts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert, Life, Wording, advance
from attnwatch.monitor.history import Array, Heads
from attnwatch.monitor.sample import SCALARS, UsageError
from attnwatch.monitor.state import State, freeze_alert, thaw_alert

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
    axes = _AXES[rule.scope]
    count, of = bad.sum(axis=axes, keepdims=True), known.sum(axis=axes, keepdims=True)
    share = count / np.maximum(of, 1)
    return _Tally(bad, of, share, (count > 0) & (share >= rule.share))


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

    def ask(self, step: int, values: Mapping[str, Array | float], heads: Heads) -> list[Alert]:
        """Takes in one sample (or the scalars of one step); the alerts whose state changed."""
        truths = {key: condition.evaluate(values) for key, condition in self._conditions.items()}
        exist = heads.exist if self._per_head else _ONE
        counting = exist if "unless" not in truths else exist & (truths["unless"] != 1)
        bad = {key: (truths[key] == 1) & counting for key in ("when", "at_once") if key in truths}
        if not self._lives and not any(np.count_nonzero(each) for each in bad.values()):
            return []
        tallies = {key: _tally(bad[key], ~np.isnan(truths[key]) & exist, self.rule) for key in bad}
        return self._judge(step, tallies["when"], tallies.get("at_once"), values, heads.layers)

    def _judge(
        self,
        step: int,
        when: _Tally,
        once: _Tally | None,
        values: Mapping[str, Array | float],
        layers: Sequence[str],
    ) -> list[Alert]:
        none = np.zeros_like(when.bad)
        once = once or _tally(none, none, self.rule)
        # Per place, what carries its verdict: at_once where that is met, else when.
        met, bad, share = (
            when.met | once.met,
            np.where(once.met, once.bad, when.bad),
            np.where(once.met, once.share, when.share),
        )

        def see(places: Sequence[_Place], pending_step: int) -> Alert:
            here = np.zeros_like(met)
            for place in places:
                here[place] = True
            return self._record(step, pending_step, float(share[places[0]]), bad & here, values, layers)

        def see_beyond(places: Sequence[_Place], pending_step: int) -> Alert:
            summary = f"{len(places)} more places than the {_MOST_ALERTS} named one by one: {self.rule.when}"
            share = len(places) / np.count_nonzero(when.known + once.known)
            return replace(see(places, pending_step), place="model", share=share, summary=summary)

        named, beyond = self._places(met)
        changed = []
        for place in named:
            verdict = bool(met[place]) if when.known[place] or once.met[place] else None
            changed += self._advance(place, verdict, step, bool(once.met[place]), partial(see, [place]))
        if beyond or _BEYOND in self._lives:
            verdict = bool(beyond) if (when.known.any() or once.met.any()) else None
            at_once = any(once.met[place] for place in beyond)
            changed += self._advance(_BEYOND, verdict, step, at_once, partial(see_beyond, beyond))
        return changed

    def state(self) -> State:
        """What its conditions remember, and the lives of its alerts."""
        lives = [
            {"at": list(place), "streak": life.streak, "alert": freeze_alert(life.alert)}
            for place, life in self._lives.items()
        ]
        return {"past": {key: condition.state() for key, condition in self._conditions.items()}, "lives": lives}

    def restore(self, state: State) -> None:
        """Raises KeyError, TypeError or ValueError for what is no state of this rule."""
        for key, condition in self._conditions.items():
            condition.restore(state["past"][key])
        for life in state["lives"]:
            row, column = life["at"]
            self._lives[int(row), int(column)] = Life(thaw_alert(life["alert"]), int(life["streak"]))

    def _places(self, met: NDArray[np.bool_]) -> tuple[list[_Place], list[_Place]]:
        """Those with an alert or about to have one, and those met for which there is no room."""
        live = [place for place in self._lives if place != _BEYOND]
        new = [(int(row), int(column)) for row, column in np.argwhere(met)]
        new = [place for place in new if place not in self._lives]
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
        values: Mapping[str, Array | float],
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
