"""Thresholds varied over stored runs, and which single number crossed its line first: worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.made_samples import sample
from tests.made_series import Step, falling, store

from attnwatch.hooks.layers import METRICS
from attnwatch.monitor import tokens
from attnwatch.monitor.predictors import predictors
from attnwatch.monitor.replay import replay, rules_of
from attnwatch.monitor.rules import Rule, load_rules
from attnwatch.monitor.sample import UsageError
from attnwatch.monitor.sweep import parse_sweep, run_sweep
from attnwatch.reports.crossings import crossings


def test_predictors_ask_the_same_of_different_numbers() -> None:
    assert {(rule.share, rule.hold, rule.scope, rule.severity) for rule in predictors()} == {(0.25, 3, "model", "info")}
    assert all(rule.unless is None and rule.at_once is None for rule in predictors())
    known = {*(metric[0] for metric in METRICS), "grad_norm"}
    assert {name for rule in predictors() for name in rule.conditions(known)["when"].names} <= known


def test_first_crossings_worked_out(tmp_path: Path) -> None:
    """Entropy passes .3 at 290: the third sample is 310. The gradient norm passes 3 at 201: the third step is 203.

    The rank is past its line from the start, the spread from the second sample on, and each fires with its third such
    sample. The others never cross."""
    found = crossings(falling(tmp_path / "run"))
    assert [(each.name, each.step, each.from_start) for each in found if each.step is not None] == [
        ("qk_rank_ratio", 20, True),
        ("spread_ratio", 30, False),
        ("grad_norm", 203, False),
        ("entropy_ratio", 310, False),
    ]
    silent = {each.name: each.measured for each in found if each.step is None}
    assert silent == dict.fromkeys(
        ("logit_max_100", "logit_max_1e3", "logit_max_1e4", "map_rank"), True
    ) | dict.fromkeys(("qk_energy_top10", "layer_directions_90", "update_rank"), False)


def test_what_was_never_finite_is_not_measured(tmp_path: Path) -> None:
    series: list[Step] = [(step, sample(step, qk_rank_ratio=math.nan), {}) for step in range(4)]
    run, _ = store(tmp_path / "run", [], series)
    measured = {each.name: each.measured for each in crossings(run)}
    assert (measured["qk_rank_ratio"], measured["entropy_ratio"], measured["grad_norm"]) == (False, True, False)


@pytest.mark.parametrize(
    ("text", "varied"),
    [
        ("x < 3", "x < 0.5"),
        ("x<3 and y>3", "x<0.5 and y>3"),
        ("not (x >= -1e3) or x == 4", "not (x >= 0.5) or x == 0.5"),
        ("2 * x < 3", "2 * x < 3"),
        ("x < 3 * y", "x < 3 * y"),
        ("x < y", "x < y"),
        ("max(x, y) < 3", "max(x, y) < 3"),
        ("median(x, 5) < 3 and x != 3", "median(x, 5) < 3 and x != 0.5"),
        ("xx < 3", "xx < 3"),
    ],
)
def test_a_threshold_is_a_number_that_a_name_alone_is_compared_with(text: str, varied: str) -> None:
    assert tokens.with_threshold(text, "x", 0.5) == varied
    assert ("x" in tokens.compared(text)) == (text != varied)


def test_a_sweep_worked_out(tmp_path: Path) -> None:
    """Below x after step 400 (1 - x), and it fires with the second sample below: .72, .52 and .32 give 130, 210, 290.

    These are 172, 92 and 12 before step 302. Of the two runs that do not diverge one falls, the other stays at .4."""
    rule = Rule("mine", "warning", "entropy_ratio < 0.1", hold=2)
    other = Rule("other", "warning", "logit_max > 10")
    runs = [
        falling(tmp_path / "diverges", diverges=True),
        falling(tmp_path / "only falls"),
        falling(tmp_path / "healthy", falls=False),
    ]
    points = run_sweep(runs, lambda run: (rule, other), parse_sweep("entropy_ratio=0.72:0.32:3"))
    assert [(point.rule, round(point.value, 9)) for point in points] == [("mine", 0.72), ("mine", 0.52), ("mine", 0.32)]
    assert [(each.score.detected, each.score.diverged, each.score.median, each.score.least) for each in points] == [
        (1, 1, 172, 172),
        (1, 1, 92, 92),
        (1, 1, 12, 12),
    ]
    assert [(each.score.alarmed, each.score.others) for each in points] == [(2, 2), (2, 2), (1, 2)]


def test_a_sweep_varies_each_rule_as_a_replay_of_the_edited_rule_would(tmp_path: Path) -> None:
    run = falling(tmp_path / "run", diverges=True)
    for point in run_sweep([run], rules_of, parse_sweep("entropy_ratio=0.2:0.8:4")):
        edited = [
            replace(rule, when=tokens.with_threshold(rule.when, "entropy_ratio", point.value))
            for rule in load_rules()
            if rule.name in (point.rule, "loss_divergence")
        ]
        lead = replay(run, edited).leads.get(point.rule)
        assert point.score.least == (lead if lead is not None and lead > 0 else None)


@pytest.mark.parametrize(
    "text", ["", "x", "x=1:2", "x=1:2:1", "x=1:2:101", "x=1:inf:3", "x=a:2:3", "=1:2:3", "x=1:2:3:4", "x=1:2:-3"]
)
def test_a_wrong_sweep_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--sweep: expected METRIC=a:b:n with 2 to 100 values"):
        parse_sweep(text)


def test_a_sweep_of_what_no_rule_compares_is_refused(tmp_path: Path) -> None:
    run = falling(tmp_path / "run")
    with pytest.raises(UsageError, match=r"found 'entropi'; there are: .*entropy_ratio, .*spread_ratio"):
        run_sweep([run], rules_of, parse_sweep("entropi=0:1:3"))
