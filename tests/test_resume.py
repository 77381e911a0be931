"""What a restart carries over: an engine goes on from any point as if nothing had happened, and so does a monitor."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_samples import COLLAPSED, METRICS, covered, sample
from tests.made_series import plain
from tests.recipes import LENGTH, TOKENS, Attention, Decoder, fused
from torch.nn import functional as F

import attnwatch
from attnwatch import Rule, UsageError, open_run
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.replay import replay, rules_of
from attnwatch.monitor.rules import Engine, load_rules
from attnwatch.monitor.sample import Sample
from attnwatch.monitor.session import Monitor

RULES = (
    *load_rules(),
    Rule("first", "info", "logit_max > 2 * start(logit_max)", scope="layer", share=0.5, keep=2),
    Rule(
        "window",
        "warning",
        "median(entropy_ratio, 4) < 0.3 or slope(spread_ratio, 3) > 1",
        scope="head",
        hold=2,
        keep=1,
    ),
    Rule("extremes", "info", "highest(loss) - lowest(loss) > 3 and logit_max > mean(logit_max, 2)", hold=2, keep=3),
    Rule("passed", "info", "scalar.tokens > mean(scalar.tokens, 3)", hold=2, keep=1),
)
Event = Callable[[Engine], tuple[Alert, ...]]


def series(seed: int, length: int = 24) -> list[Event]:
    """Samples and scalars in turn: wild numbers, NaN and infinity among them, a layer that comes later."""
    rng = np.random.default_rng(seed)
    names = tuple(metric.name for metric in METRICS)
    events: list[Event] = []
    for step in range(length):
        layers = tuple(f"layer{i}" for i in range(2 if step < length // 2 else 3))
        values = np.exp(2 * rng.normal(size=(len(names), len(layers), 3))).astype(np.float32)
        values[rng.random(values.shape) < 0.15] = np.nan
        values[rng.random(values.shape) < 0.05] = np.inf
        taken = Sample(step, 0.0, names, layers, values)
        passed = {"loss": float(rng.choice([np.nan, np.inf, -np.inf, 2.0, 6.0])), "tokens": float(rng.integers(9))}
        if rng.random() < 0.7:
            events.append(lambda engine, taken=taken: engine.on_sample(taken, covered(3, 3, "float16"), {}))  # type: ignore[misc]
        events.append(lambda engine, step=step, passed=passed: engine.on_scalars(step, passed))  # type: ignore[misc]
    return events


def through_files(state: dict[str, Any]) -> dict[str, Any]:
    """Strict JSON: no NaN, no infinity. And a checkpoint that torch loads as it does by default: plain types only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    made: dict[str, Any] = json.loads(json.dumps(torch.load(file, weights_only=True), allow_nan=False))
    return made


# --- the engine -------------------------------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_an_engine_goes_on_from_every_point_as_if_nothing_had_happened(seed: int) -> None:
    """What changes at every later step, and all alerts at the end, are those of the engine that was never stopped."""
    events = series(seed)
    whole = Engine(RULES, METRICS)
    changed, states = [], []
    for event in events:
        states.append(through_files(whole.state_dict()))
        changed.append(event(whole))
    assert sum(map(len, changed)) > 20
    for split, state in enumerate(states):
        other = Engine(RULES, METRICS).resumed(state)
        assert repr([event(other) for event in events[split:]]) == repr(changed[split:])
        assert repr(other.alerts) == repr(whole.alerts)


def test_a_state_is_what_it_was_made_from() -> None:
    engine = Engine(RULES, METRICS)
    for event in series(0):
        event(engine)
    state = engine.state_dict()
    before = copy.deepcopy(state)
    assert Engine(RULES, METRICS).resumed(state).state_dict() == state
    for event in series(1):
        event(engine)
    assert state == before  # a copy, that does not change with the engine


def test_the_cap_on_alerts_survives() -> None:
    """64 heads have an alert, one more stands for the 16 others; a restart tells none of them again."""
    rules = [Rule("r", "info", "logit_max > 100", scope="head", hold=2, keep=1)]
    engine = Engine(rules, METRICS)
    bad = sample(0, layers=20, logit_max=200.0)
    assert [len(engine.on_sample(bad, (), {})) for _ in range(2)] == [65, 65]
    other = Engine(rules, METRICS).resumed(through_files(engine.state_dict()))
    assert len(other.alerts) == 65
    assert other.on_sample(bad, (), {}) == ()
    assert len(other.on_sample(sample(1, layers=20), (), {})) == 65


def test_a_held_spectrum_survives() -> None:
    """After a healthy sample the rank is measured in the first of three only."""
    rules = [rule for rule in load_rules() if rule.name == "sparse_low_rank"]
    engine = Engine(rules, METRICS)
    for step, heads in ((-1, {}), (0, COLLAPSED)):
        engine.on_sample(sample(step, **heads), covered(), {})
    engine = Engine(rules, METRICS).resumed(through_files(engine.state_dict()))
    later = COLLAPSED | {"qk_rank_ratio": float("nan")}
    assert engine.on_sample(sample(1, **later), covered(), {}) == ()
    assert [each.state for each in engine.on_sample(sample(2, **later), covered(), {})] == ["firing"]


# --- states that are not ours -----------------------------------------------------------------------------------------


def test_other_rules_and_metrics_are_named() -> None:
    state = Engine(RULES, METRICS).state_dict()
    edited = [replace(rule, share=0.3) if rule.name == "precision" else rule for rule in RULES[:-1]]
    added = [*edited, Rule("mine", "info", "loss > 1")]
    with pytest.raises(
        UsageError, match=r"^expected a state of these rules, found one that differs in (.*); watch with"
    ):
        Engine(added, METRICS).resumed(state)
    with pytest.raises(UsageError) as error:
        Engine(added, METRICS).resumed(state)
    for said in ("precision (changed)", "passed (not in these)", "mine (not in it)"):
        assert said in str(error.value)
    with pytest.raises(UsageError, match="differs in their order"):
        Engine(RULES[::-1], METRICS).resumed(state)
    few = Engine([RULES[-1]], METRICS[:-1])
    with pytest.raises(UsageError, match=r"of these metrics, found one that differs in bound_use \(not in these\)"):
        few.resumed(Engine([RULES[-1]], METRICS).state_dict())


@pytest.mark.parametrize("key", ["rules", "metrics", "heads", "scalars", "alerts", "watches"])
@pytest.mark.parametrize("wrong", [None, 5, "x", [{}], {"shape": [1]}], ids=repr)
def test_a_damaged_state_is_one_line(key: str, wrong: object) -> None:
    engine = Engine(RULES, METRICS)
    for event in series(0, 4):
        event(engine)
    state = engine.state_dict()
    for damaged in ({**state, key: wrong}, {name: part for name, part in state.items() if name != key}):
        with pytest.raises(UsageError) as error:
            Engine(RULES, METRICS).resumed(damaged)
        assert "\n" not in str(error.value)


def test_arrays_of_the_wrong_shape_are_refused() -> None:
    engine = Engine(RULES, METRICS)
    for event in series(0, 4):
        event(engine)
    state = through_files(engine.state_dict())
    state["heads"]["layers"].append("another")
    with pytest.raises(UsageError, match="found a state that cannot be read"):
        Engine(RULES, METRICS).resumed(state)


@pytest.mark.parametrize(
    ("key", "wrong"), [
        ("at", [0, 5]), ("at", [-2, 0]), ("at", [10**30, 0]), ("at", []), ("pending_step", [1]),
        ("pending_step", 2**70), ("place", {}), ("rule", None), ("shape", None),
    ],
)  # fmt: skip
def test_what_the_next_sample_would_stumble_over_is_refused(key: str, wrong: object) -> None:
    """An alert at a head that no layer has, or with fields of other types; a lowest value of no shape."""
    rules = [Rule("r", "info", "logit_max > lowest(logit_max)", scope="head", share=0, hold=9)]
    engine = Engine(rules, METRICS)
    for step in range(2):
        engine.on_sample(sample(step, logit_max=2.0 + step), covered(), {})
    state = through_files(engine.state_dict())
    (watch,) = state["watches"]
    life = watch["lives"][0]
    for part in (life, life["alert"], watch["past"]["when"][0]):
        if key in part:
            part[key] = wrong
    with pytest.raises(UsageError, match="found a state that cannot be read"):
        Engine(rules, METRICS).resumed(state)


# --- the monitor ------------------------------------------------------------------------------------------------------

WATCHED = [
    Rule("loud", "warning", "logit_max > mean(logit_max, 3)", share=0.25, hold=2, keep=1),
    Rule("wide", "critical", "logit_spread > 1.02 * start(logit_spread)", scope="layer", share=0, hold=2, keep=2),
    Rule("loss", "info", "loss > lowest(loss)", hold=3, keep=2),
    Rule("saw", "info", "loss > mean(loss, 2)", keep=1),
    Rule("always", "info", "entropy_ratio > 0", hold=2),
]
STEPS = 30


class Training:
    """The same training every time: model and optimizer, and batches and chance that depend on the step alone."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Decoder(partial(Attention, fused))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def watch(self, run: Path, rules: list[Rule] | None = None, **options: Any) -> Monitor:
        kept = {"every": 3, "spectrum_every": 1, "rows": None, "report": False}
        return attnwatch.watch(self.model, run=run, rules=WATCHED if rules is None else rules, **{**kept, **options})

    def steps(self, monitor: Monitor, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)  # of dropout too
            tokens = torch.randint(TOKENS, (3, LENGTH + 1))
            loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            monitor.step(loss=loss)


@pytest.mark.parametrize("split", [1, 7, 9, 20])
def test_a_training_that_is_interrupted_has_the_alerts_of_one_that_is_not(split: int, tmp_path: Path) -> None:
    """Through a checkpoint file; sampled at the same steps, and both runs replay to what they recorded."""
    whole = Training()
    with whole.watch(tmp_path / "whole") as monitor:
        whole.steps(monitor, 0, STEPS)
    expected = plain(monitor.alerts)
    assert {each["rule"] for each in expected} == {rule.name for rule in WATCHED}
    assert {each["state"] for each in expected} == {"firing", "resolved"}

    first = Training()
    with first.watch(tmp_path / "first") as monitor:
        first.steps(monitor, 0, split)
        saved = (monitor.state_dict(), first.model.state_dict(), first.optimizer.state_dict())
        torch.save(saved, tmp_path / "checkpoint.pt")
    second = Training()
    state, weights, optimizer = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(optimizer)
    with second.watch(tmp_path / "second") as monitor:
        monitor.load_state_dict(state)
        second.steps(monitor, split, STEPS)
    assert plain(monitor.alerts) == expected

    runs = [open_run(tmp_path / name) for name in ("whole", "first", "second")]
    assert (
        np.concatenate([run.steps for run in runs[1:]]).tolist() == runs[0].steps.tolist() == list(range(0, STEPS, 3))
    )
    assert plain(runs[2].alerts) == expected
    for run in runs:
        assert run.problems == ()
        assert plain(replay(run, rules_of(run)).alerts) == plain(run.alerts)


def test_nothing_is_told_again(tmp_path: Path) -> None:
    """Neither to outputs nor by stop_on; what stands is known at once, and steps are counted on."""
    training = Training()
    with training.watch(tmp_path / "first") as monitor:
        training.steps(monitor, 0, 12)
        state = through_files(monitor.state_dict())
    firing = [each for each in monitor.alerts if each.state == "firing"]
    assert firing

    told: list[Alert] = []

    class Output:
        def write(self, update: attnwatch.monitor.sample.Update) -> None:
            told.extend(update.changed)

        def close(self) -> None:
            """Nothing is held."""

    with training.watch(tmp_path / "second", outputs=[Output()], stop_on="info") as monitor:
        monitor.load_state_dict(state)
        assert set(map(repr, firing)) <= set(map(repr, monitor.alerts))
        assert "step 11, next sampled step 12" in str(monitor)
        assert all(
            each in str(monitor) for each in (f"{a.rule} at {a.place} since step {a.fired_step}" for a in firing)
        )
        training.steps(monitor, 12, 13)
    again = {(each.rule, each.place, each.pending_step) for each in firing}
    assert [
        each for each in told if each.state == "firing" and (each.rule, each.place, each.pending_step) in again
    ] == []


def test_the_first_sample_after_a_restart_looks_at_the_weights(tmp_path: Path) -> None:
    """Though the schedule says otherwise: nothing is proved in the new process."""
    first = Training()
    with first.watch(tmp_path / "first", spectrum_every=100) as monitor:
        first.steps(monitor, 0, 4)
        state = monitor.state_dict()
    second = Training()
    with second.watch(tmp_path / "second", spectrum_every=100) as monitor:
        monitor.load_state_dict(state)
        second.steps(monitor, 4, 13)
    assert {layer.state for layer in monitor.coverage} == {"verified"}
    measured = np.isfinite(open_run(tmp_path / "second").metric("qk_rank")).all(axis=(1, 2))
    assert measured.tolist() == [True, False, False]


def test_a_state_may_be_taken_at_any_time(tmp_path: Path) -> None:
    """Before the first step, and after the end."""
    training = Training()
    with training.watch(tmp_path / "first") as monitor:
        fresh = monitor.state_dict()
        training.steps(monitor, 0, 2)
    assert monitor.state_dict()["counts"]["finished"] == 2
    with training.watch(tmp_path / "second") as monitor:
        monitor.load_state_dict(fresh)
        training.steps(monitor, 0, 1)
        assert monitor.last is not None


def test_wrong_use_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    training = Training()
    with training.watch(tmp_path / "first") as monitor:
        training.steps(monitor, 0, 5)
        state = monitor.state_dict()
        with pytest.raises(UsageError, match=r"^expected load_state_dict right after watch\(\), found steps done"):
            monitor.load_state_dict(state)
    with training.watch(tmp_path / "second", rules=WATCHED[:2]) as monitor:
        with pytest.raises(
            UsageError, match=r"differs in loss \(not in these\), saw \(not in these\), always \(not in these\)"
        ):
            monitor.load_state_dict(state)
        for wrong in (
            {},
            {"counts": {}},
            {**state, "counts": {**state["counts"], "step": "x"}},
            {**state, "engine": 1},
            7,
        ):
            with pytest.raises(UsageError, match=r"^expected what monitor\.state_dict\(\) gave, found .*; pass that"):
                monitor.load_state_dict(wrong)  # type: ignore[arg-type]
        assert "next sampled step 0" in str(monitor)
        training.steps(monitor, 0, 1)
    run = open_run(tmp_path / "second")
    assert (run.resumed, run.steps.tolist()) == (None, [0])
