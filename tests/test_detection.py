"""The crash benchmark: a fast part of it run for real, and its own arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.detection import sampling
from benchmarks.detection.data import IGNORED, Batch
from benchmarks.detection.held_out import HELD_OUT
from benchmarks.detection.models import rotated, slopes
from benchmarks.detection.predictors import PREDICTORS, crossing
from benchmarks.detection.recipe import COLLAPSES, DIVERGES, HEALTHY, SPIKES, Recipe
from benchmarks.detection.recipes import RECIPES
from benchmarks.detection.replay import replay
from benchmarks.detection.score import Case, by_rule, by_severity, interval, score
from benchmarks.detection.study import Known, cases, known, measures, with_references
from benchmarks.detection.table import pages
from benchmarks.detection.tasks import TASKS
from benchmarks.detection.train import train
from benchmarks.detection.truth import Truth, onset
from tests.made_series import falling

from attnwatch import open_run
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Rule, load_rules

FAST = ("batch_4", "mlp_seed_0", "norm_rms", "copy_previous_1", "copy_previous_2", "sinks_apart", "sane", "sane_mlp")
FOUND = by_rule("sparse_low_rank", "entropy_collapse")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    """The fast part of the benchmark, trained."""
    place = tmp_path_factory.mktemp("detection")
    chosen = [recipe for recipe in RECIPES if recipe.name in FAST]
    for recipe in chosen:
        train(recipe, place / recipe.folder)
    return known(chosen, place)


@pytest.fixture(scope="module")
def judged(runs: list[Known]) -> dict[str, Case]:
    return {case.recipe.name: case for case in cases(runs, load_rules())}


def test_every_fast_run_becomes_what_it_was_meant_to_be(judged: dict[str, Case]) -> None:
    """By its loss: the divergent one diverges, the collapsing one learns worse, the healthy ones learn."""
    assert {name: case.truth.label for name, case in judged.items()} == dict.fromkeys(FAST, HEALTHY) | {
        "batch_4": DIVERGES,
        "mlp_seed_0": COLLAPSES,
    }
    assert all(case.as_meant for case in judged.values())


def test_collapse_is_found_long_before_the_loss_diverges(judged: dict[str, Case]) -> None:
    case = judged["batch_4"]
    lead = case.lead(FOUND)
    assert lead is not None
    assert lead >= 100


def test_collapse_that_never_diverges_is_found(judged: dict[str, Case]) -> None:
    case = judged["mlp_seed_0"]
    assert {"sparse_low_rank", "entropy_collapse"} <= {alert.rule for alert in case.fired(FOUND)}


@pytest.mark.parametrize("name", ["norm_rms", "copy_previous_1", "copy_previous_2", "sane", "sane_mlp"])
def test_healthy_runs_raise_no_alarm(judged: dict[str, Case], name: str) -> None:
    """Neither a high rate with QK-norm, nor a head that has learned to copy the byte before, nor a usual model."""
    assert judged[name].fired(by_severity("critical", "warning")) == []


def test_replay_equals_live(runs: list[Known]) -> None:
    """The stored samples and scalars lead to the very alerts that were told while the model trained."""
    for _, run, _ in runs:
        fired = [alert for alert in replay(run, load_rules()) if alert.fired_step is not None]
        assert sorted(map(str, fired)) == sorted(map(str, run.alerts))  # as text: NaN is not equal to itself


@pytest.mark.parametrize("predictor", PREDICTORS, ids=lambda p: p.metric)
def test_a_line_is_crossed_where_its_rule_fires(runs: list[Known], predictor: object) -> None:
    """The quick way by which lines are tuned and the rule engine agree on every run."""
    assert isinstance(predictor, type(PREDICTORS[0]))
    for _, run, _ in runs:
        reach = predictor.reach(run)
        line = float(np.nanmedian(reach)) * (1.001 if predictor.below else 0.999)  # no tie
        at = crossing(predictor, reach, line)
        fired = [alert.fired_step for alert in replay(run, [predictor.rule(line)])]
        crossed = None if at is None else int(run.steps[at])
        if predictor.metric == "grad_norm":  # asked at every step, and so up to a sample earlier
            assert (crossed is None) == (fired == [])
            assert crossed is None or 0 <= crossed - (fired[0] or 0) < 5
        else:
            assert crossed == (fired[0] if fired else None)


def test_watching_fewer_rows_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    """Two cadences and numbers of rows, one recipe: the same losses, bit for bit."""
    base = replace(sampling.BASES[0], steps=12)
    for number, recipe in enumerate((replace(base, every=1, rows=16), replace(base, every=5, rows=None))):
        train(recipe, tmp_path / str(number))
    losses = [open_run(tmp_path / name).scalar("loss")[1] for name in ("0", "1")]
    assert losses[0].tobytes() == losses[1].tobytes()


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_onset_of_divergence() -> None:
    """Loss 2 for 30 steps, then 4: the mean of 20 passes 2.3 with the fourth, at step 33; 39 steps more make it one."""
    losses = np.array([2.0] * 30 + [4.0] * 43)
    assert onset(np.arange(73), losses, 0.3) == (33, None)
    assert onset(np.arange(72), losses[:72], 0.3) == (None, None)
    assert onset(np.arange(73), losses, 2.5) == (None, None)


def test_a_loss_that_is_no_number_is_the_onset() -> None:
    assert onset(np.arange(0, 50, 10), np.array([2.0, 2.0, np.nan, 2.0, np.inf]), 0.3) == (20, 20)


def alert(rule: str, fired: int, resolved: int | None = None) -> Alert:
    return Alert(rule, "critical", "firing", "model", fired, fired, resolved, 0.5, (), {}, "", "")


def case(name: str, label: str, start: int | None, alerts: Sequence[Alert], nonfinite: int | None = None) -> Case:
    recipe = Recipe(name, label, ((0, 0.1),), 10)
    return Case(recipe, Truth(label, start, 2.0, 0.0, (0, 0), (0, 0), (0, 0), nonfinite), tuple(alerts))


def test_score_worked_out() -> None:
    """Four collapses: 60 ahead; resolved too early; too late; without divergence. Two sound runs, one with an alarm."""
    made = [
        case("early", DIVERGES, 100, [alert("a", 40)]),
        case("gone", DIVERGES, 100, [alert("a", 40, 80)]),
        case("late", DIVERGES, 100, [alert("a", 120)]),
        case("plateau", COLLAPSES, None, [alert("a", 70, 80)]),
        case("quiet", HEALTHY, None, [alert("b", 10)]),
        case("nan", SPIKES, 50, [alert("a", 20), alert("a", 60)], nonfinite=50),
        case("elsewhere", "uniform", None, [alert("a", 20)]),
    ]
    found = score(made, by_rule("a"))
    assert (found.positives, found.found, found.late, found.leads) == (4, 2, 2, (60,))
    assert (found.healthy, found.wolf, found.missed, found.false) == (2, 1, ("gone", "late"), ("nan",))
    assert [a.fired_step for a in made[5].fired(by_rule("a"))] == [20]  # what follows the first NaN says nothing


def test_intervals() -> None:
    """All alike: no width. A fair coin of 100 throws: about a tenth to each side, whatever the seed."""
    assert interval([7.0] * 5) == (7.0, 7.0)
    low, high = interval([0.0, 1.0] * 50, lambda x: float(x.mean()))
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.03)


def test_parts_depend_on_names_alone() -> None:
    """Changing what a recipe does moves its run directory, never its part; no name is given twice."""
    one = RECIPES[0]
    assert replace(one, seed=5).part == one.part
    assert replace(one, seed=5).folder != one.folder
    assert replace(one, label=HEALTHY, reference="x", fresh=True).folder == one.folder
    assert {recipe.part for recipe in RECIPES} == {"tuning", "report"}
    assert {recipe.part for recipe in HELD_OUT} == {"held out"}
    every = (*RECIPES, *HELD_OUT)
    names = [recipe.name for recipe in (*every, *sampling.SAMPLED)]
    assert len(set(names)) == len(names)
    assert {r.reference for r in every} - {""} <= set(names)


@pytest.mark.parametrize("recipe", HELD_OUT, ids=lambda recipe: recipe.name)
def test_no_held_out_recipe_is_one_that_was_seen(recipe: Recipe) -> None:
    """Whatever its name: another seed, task, shape or rate than any recipe that the rules were chosen on."""
    seen = {replace(known, name="", label="", reference="") for known in RECIPES}
    assert replace(recipe, name="", label="", reference="", fresh=False) not in seen


# --- tasks and positions ---------------------------------------------------------------------------------------------


def drawn(task: str, length: int) -> Batch:
    return TASKS[task](64, length, 0, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("task", ["copy_string", "sort_string"])
def test_strings_are_answered_after_the_separator(task: str) -> None:
    """8 letters, a 0, and 8 answers each of which is the target one place before it stands."""
    inputs, targets, _ = drawn(task, 16)
    assert inputs.shape == targets.shape == (64, 16)
    given = inputs[:, :8]
    assert (targets[:, :8] == IGNORED).all()
    assert (inputs[:, 8] == 0).all()
    wanted = given if task == "copy_string" else given.sort(1).values
    assert torch.equal(targets[:, 8:], wanted)
    assert torch.equal(inputs[:, 9:], wanted[:, :-1])


def test_recall_asks_for_values_it_has_told() -> None:
    """4 pairs, then 8 questions: at each the target is the value told with that key, everywhere else nothing."""
    inputs, targets, _ = drawn("recall", 24)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0:8:2], row[1:8:2], strict=True))
        assert sorted(value) == [0, 1, 2, 3]
        assert wanted[8::2] == [value[key] for key in row[8::2]]
        assert set(wanted[:8] + wanted[9::2]) == {IGNORED}


def test_a_walk_follows_its_own_map_three_steps_in_four() -> None:
    """Of the steps from a letter, at least 1 - JUMP go to the same one; maps differ between sequences."""
    inputs, targets, _ = drawn("own_map", 512)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    step = torch.zeros(64, 16, 16)
    step.index_put_((torch.arange(64)[:, None].expand_as(inputs), inputs, targets), torch.ones(()), accumulate=True)
    assert step.amax(2).sum().item() / inputs.numel() == pytest.approx(0.75 + 0.25 / 16, abs=0.02)
    assert len({tuple(row.tolist()) for row in step.argmax(2)}) == 64


def test_questions_without_causal_mask() -> None:
    inputs, targets, _ = drawn("maximum", 16)
    assert torch.equal(targets, inputs.amax(1, keepdim=True).expand(-1, 16))
    inputs, targets, _ = drawn("reverse", 16)
    assert torch.equal(targets[:, 0], inputs[:, -1])
    assert torch.equal(targets[:, -1], inputs[:, 0])


def test_rotated_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = rotated(q.expand(1, 1, 6, 8)) @ rotated(k.expand(1, 1, 6, 8)).mT
    for distance in range(6):
        along = logits[0, 0].diagonal(-distance)
        assert torch.allclose(along, along[0], atol=1e-6)
    assert logits[0, 0, 0, 0].item() == pytest.approx((q @ k).item())


def test_slopes_by_hand() -> None:
    """Two heads: slopes 2^-4 and 2^-8 a position back; what comes later is hidden."""
    found = slopes(2, 3)
    assert found[0].tolist() == [[0, -inf, -inf], [-1 / 16, 0, -inf], [-2 / 16, -1 / 16, 0]]
    assert found[1, 2].tolist() == [-2 / 256, -1 / 256, 0]


def test_lines_are_rules_that_load() -> None:
    assert [type(predictor.rule(0.5)) for predictor in PREDICTORS] == [Rule] * len(PREDICTORS)


@pytest.mark.parametrize(
    ("when", "unless", "asked"),
    [
        ("entropy_ratio < 0.3 and scalar.tokens > 1", None, True), ("grad_norm > 3 * lowest(grad_norm)", None, True),
        ("update_rank < 2", None, False), ("entropy_ratio < 0.3", "median(update_rank, 3) > 2", False),
    ],
)  # fmt: skip
def test_no_rule_is_asked_about_what_a_run_did_not_measure(
    when: str, unless: str | None, asked: bool, tmp_path: Path
) -> None:
    assert measures(falling(tmp_path / "run"), Rule("r", "info", when, unless)) is asked


def test_a_recipe_comes_with_what_it_is_held_against() -> None:
    chosen = [recipe for recipe in RECIPES if recipe.name in ("depth_4_seed_0", "sane_low")]
    assert [recipe.name for recipe in with_references(chosen)] == ["depth_4_seed_0", "sane_low", "sane"]


def test_a_page_of_few_runs(runs: list[Known]) -> None:
    """As `--only` makes it: no run, one that is healthy, one that diverges."""
    for some, said in (
        ([], "No run of the held-out part is there."),
        ([x for x in runs if x.recipe.name == "sane"], "Nothing came before a divergence."),
        ([x for x in runs if x.recipe.name == "batch_4"], "Over 1 divergent runs "),
    ):
        figures, every = pages(some, [], load_rules())
        assert said in figures
        assert len([line for line in every.splitlines() if line.startswith("| `")]) == len(some)
        assert not {"| nan", "| -inf", "| inf"} & {cell.rstrip() for cell in re.findall(r"\| [^|]*", figures + every)}
