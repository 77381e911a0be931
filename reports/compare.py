"""Several runs side by side: what differs between them, what became of each, and their losses in one picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnwatch.monitor.leads import warnings
from attnwatch.reports import facts
from attnwatch.reports.summary import last_step, lead, main_alert, onset, verdict, where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnwatch.monitor.run import Run

UNSET = "not set"


class Difference(NamedTuple):
    """A fact that is not the same in all runs. values: of each run. kind: what sort of fact."""

    kind: str
    name: str
    values: tuple[str, ...]


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Options first, then the model, rules and versions; not when, where and how long a run was."""
    if len(runs) < 2:
        return []
    sides = [_sides(run) for run in runs]
    rows = []
    for kind in sides[0]:
        for name in dict.fromkeys(name for side in sides for name in side[kind]):
            values = tuple(side[kind].get(name, UNSET) for side in sides)
            if len(set(values)) > 1:
                rows.append(Difference(kind, name, values))
    return rows


def _sides(run: Run) -> dict[str, dict[str, str]]:
    known = facts.facts(run)
    about = {name: value for name, value in known.about.items() if name not in ("created", "ended")}
    asked = {rule.get("name", ""): _rule(rule) for rule in facts.rules(run)}
    return {"option": known.options, "model": about | known.seen, "rule": asked, "version": known.versions}


def _rule(rule: dict[str, str]) -> str:
    return "; ".join(f"{key} {value}" for key, value in rule.items() if key != "name")


class Outcome(NamedTuple):
    """One row of the table of verdicts; empty where there is nothing to say."""

    run: str
    state: str
    alert: str
    fired: int | None
    place: str
    diverged: int | None
    lead: int | None
    alerts: int
    loss: float | None
    last_step: int | None


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    return [_outcome(run, name) for run, name in zip(runs, facts.names(runs), strict=True)]


def _outcome(run: Run, name: str) -> Outcome:
    alert = main_alert(run)
    return Outcome(
        name,
        verdict(run)[0],
        "" if alert is None else alert.rule,
        None if alert is None else alert.fired_step,
        "" if alert is None else where(alert),
        onset(run),
        lead(run),
        len(warnings(run.alerts)),
        _last_loss(run),
        last_step(run),
    )


def _last_loss(run: Run) -> float | None:
    """Mean of the loss of the last 20 steps that passed one; NaN while one of them is not finite."""
    if "loss" not in run.scalar_names:
        return None
    values = run.scalar("loss")[1][-20:]
    return float(np.sum(values / len(values))) if np.isfinite(values).all() else math.nan
