"""From stored runs to figures: every rule and every single predictor on each part of the recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.detection.held_out import HELD_OUT
from benchmarks.detection.predictors import PREDICTORS, Predictor, candidates, crossing
from benchmarks.detection.recipe import COLLAPSE, SOUND, Recipe
from benchmarks.detection.recipes import RECIPES
from benchmarks.detection.replay import divergence, replay
from benchmarks.detection.run import stored
from benchmarks.detection.score import Case
from benchmarks.detection.truth import Truth, find, rise
from numpy.typing import NDArray

from attnwatch.hooks.layers import METRICS
from attnwatch.monitor.predictors import predictors
from attnwatch.monitor.rules import Rule
from attnwatch.monitor.run import Run
from attnwatch.monitor.sweep import Sweep, variants

PARTS = ("tuning", "report", "held out")
SPREADS = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 15.0)
"""Numbers to try in place of those that the collapse rules compare spread_ratio with."""


class Known(NamedTuple):
    recipe: Recipe
    run: Run
    truth: Truth


def known(recipes: Sequence[Recipe], runs: Path) -> list[Known]:
    """The recipes that were run, with what became of them; those whose reference was not run are left out."""
    found = {recipe.name: stored(recipe, runs) for recipe in with_references(recipes)}
    result = []
    for recipe in recipes:
        run, reference = found[recipe.name], found.get(recipe.reference)
        if run is not None and (reference is not None or not recipe.reference):
            result.append(Known(recipe, run, find(recipe, run, reference)))
    return result


def with_references(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Those, and the healthy ones that they are held against."""
    named = {recipe.name: recipe for recipe in (*RECIPES, *HELD_OUT, *recipes)}
    wanted = [*(recipe.name for recipe in recipes), *(recipe.reference for recipe in recipes if recipe.reference)]
    return [named[name] for name in dict.fromkeys(wanted)]


def cases(runs: Iterable[Known], rules: Sequence[Rule], thin: int = 1) -> list[Case]:
    """Rules about what a run did not measure are not asked of it."""
    asked = ((x, [rule for rule in rules if measures(x.run, rule)]) for x in runs)
    return [Case(x.recipe, x.truth, replay(x.run, divergence(some, rise(x.recipe)), thin)) for x, some in asked]


def measures(run: Run, rule: Rule) -> bool:
    """Whether a run has the metrics that a rule names: some were added when most runs were there."""
    missing = {name for name, *_ in METRICS} - {metric.name for metric in run.metrics}
    return all(missing.isdisjoint(condition.names) for condition in rule.conditions(None).values())


def lines(runs: Sequence[Known]) -> list[Rule]:
    """A rule for each single number: with the line that attnwatch ships, and with the best one on the tuning part."""
    shipped = [replace(rule, name=f"shipped.{rule.name}") for rule in predictors()]
    tuning = [x for x in runs if x.recipe.part == "tuning"]
    best = ((predictor, best_line(predictor, tuning)) for predictor in PREDICTORS)
    return [*shipped, *(predictor.rule(line) for predictor, line in best if line is not None)]


def swept(rules: Sequence[Rule]) -> list[tuple[Rule, str, float]]:
    """The collapse rules `rules` with each of SPREADS in them, with the name of the rule and the number."""
    made = variants(rules, Sweep("spread_ratio", SPREADS)).items()
    return [(replace(rule, name=name, severity="info"), was.name, value) for name, (rule, value, was) in made]


def ablated(rules: Sequence[Rule]) -> list[tuple[Rule, str]]:
    """Each of the rules with one condition left out, and each condition alone, if these are joined by `and` only."""
    made = []
    for rule in rules:
        when = " ".join(rule.when.split())
        if " or " in when or " and " not in when:
            continue
        conditions = when.split(" and ")
        texts = {f"without `{c}`": (" and ".join(d for d in conditions if d != c), rule.unless) for c in conditions}
        texts[f"without unless `{rule.unless}`"] = (when, None)
        texts |= {f"`{c}` alone": (c, None) for c in conditions}
        for number, (what, (when, unless)) in enumerate(texts.items()):
            name = f"ablated.{rule.name}.{number}"
            made.append((Rule(name, "info", when, unless, share=rule.share, hold=rule.hold, keep=rule.keep), what))
    return made


def best_line(predictor: Predictor, runs: Sequence[Known]) -> float | None:
    """The line with the highest rate of detection less rate of false alarm, then with the longest median lead; None
    where no run says anything of it."""
    positive = [x for x in runs if x.truth.label in COLLAPSE and not x.recipe.abrupt]
    sound = [x for x in runs if x.truth.label in SOUND]
    reaches = {x.recipe.name: _until_failure(x, predictor.reach(x.run)) for x in positive + sound}

    def merit(line: float) -> tuple[float, float]:
        found = [(x, at) for x in positive if (at := crossing(predictor, reaches[x.recipe.name], line)) is not None]
        wolf = sum(crossing(predictor, reaches[x.recipe.name], line) is not None for x in sound)
        leads = [x.truth.onset - int(x.run.steps[at]) for x, at in found if x.truth.onset is not None]
        youden = len(found) / max(len(positive), 1) - wolf / max(len(sound), 1)
        return round(youden, 9), float(np.median(leads)) if leads else 0.0

    return max(candidates(list(reaches.values())).tolist(), key=merit, default=None)


def _until_failure(x: Known, reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """A line first crossed at the onset of divergence or later warns of nothing."""
    return reach if x.truth.onset is None else reach[x.run.steps < x.truth.onset]
