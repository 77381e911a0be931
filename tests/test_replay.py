"""Rules over stored runs: a replay is what happened live, and what it says of leads and changes is counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_runs import alert, divergence
from tests.made_samples import METRICS, covered, sample
from tests.made_series import Step, falling, plain, store

import attnwatch
from attnwatch.monitor import demo
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.leads import leads, onset
from attnwatch.monitor.replay import Change, Outcome, changes, replay, rules_of, score
from attnwatch.monitor.rules import Rule, load_rules
from attnwatch.monitor.sample import Coverage, Sample, UsageError
from attnwatch.monitor.store import RunWriter, open_run

# --- a replay is what happened --------------------------------------------------------------------------------------

SENSITIVE = [
    Rule("falls", "warning", "entropy_ratio < median(entropy_ratio, 3)", share=0.5, keep=1),
    Rule("spreads", "critical", "logit_spread > start(logit_spread)", scope="layer", share=0, hold=2, keep=2),
    Rule("turns", "info", "slope(qk_sigma_max, 3) > 0", scope="head", keep=1),
    Rule("noisy_loss", "info", "loss > mean(loss, 5)", at_once="not finite(loss)", hold=2, keep=1),
    Rule(
        "mixed", "info", "loss > lowest(loss) and measured_layers > 0", hold=2, keep=1, summary="{loss:.3f} at {step}"
    ),
    Rule("blind", "warning", "uncovered_layers > 0", keep=2),
]


def test_a_trained_run_replays_to_the_alerts_that_it_recorded(tmp_path: Path) -> None:
    """The demo's model on real text, with rules that fire and resolve often, a loss of NaN, samples that give nothing
    (eval mode, before and after layers are known), and a scalar that only some steps pass."""
    demo.one_thread()
    torch.manual_seed(0)
    model = demo.Decoder(qk_norm=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    text, order = demo.corpus(), torch.Generator().manual_seed(0)
    with attnwatch.watch(model, run=tmp_path / "run", every=2, rules=SENSITIVE, report=False) as monitor:
        for step in range(36):
            model.train(step > 2 and step not in (10, 12))
            starts = torch.randint(0, len(text) - demo.CONTEXT - 1, (4,), generator=order)
            loss = model(torch.stack([text[start : start + demo.CONTEXT + 1] for start in starts]).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            passed = {"loss": float("nan") if step == 20 else loss.item()} | ({"lr": 0.02} if step % 3 else {})
            monitor.step(**passed)
    run = open_run(tmp_path / "run")
    assert run.unmeasured == (0, 2)
    assert np.isnan(run.metric("entropy")[run.steps.tolist().index(12)]).all()
    assert {each.rule for each in run.alerts} == {rule.name for rule in SENSITIVE}
    assert len(run.alerts) > 50
    assert plain(replay(run, rules_of(run)).alerts) == plain(run.alerts)


def test_the_demo_replays_to_the_alerts_that_it_recorded(tmp_path: Path) -> None:
    demo.one_thread()
    demo.train("plain", tmp_path / "run", steps=60)
    run = open_run(tmp_path / "run")
    assert rules_of(run) == load_rules()
    assert plain(replay(run, rules_of(run)).alerts) == plain(run.alerts)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_any_series_replays_to_its_alerts(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Wild numbers, holes, layers that come later, samples of nothing, coverage that changes, steps left out."""
    rng = np.random.default_rng(seed)
    names = tuple(metric.name for metric in METRICS)
    rules = [*load_rules(), Rule("m", "info", "logit_max > median(logit_max, 3) and loss > 1", scope="head", keep=1)]
    series: list[Step] = []
    news: dict[int, Sequence[Coverage]] = {}
    step = 0
    for index in range(30):
        step += int(rng.integers(1, 4))
        taken = None
        if rng.random() < 0.7:
            layers = tuple(f"layer{i}" for i in rng.permutation(int(rng.integers(0, 3 if index < 15 else 5))))
            values = np.exp(2 * rng.normal(size=(len(names), len(layers), 3))).astype(np.float32)
            values[rng.random(values.shape) < 0.2] = np.nan
            taken = Sample(step, 0.0, names, layers, values)
            if not news or rng.random() < 0.2:
                states = rng.choice(["verified", "logits_only", "uncovered"], 5)
                news[step] = [Coverage(f"layer{i}", state, 3, 3, 16, dtype="float16") for i, state in enumerate(states)]
        scalars = {"loss": float(rng.choice([np.nan, np.inf, 1.0, 2.0, 9.0]))} if rng.random() < 0.8 else {}
        series.append((step, taken, scalars))
    run, alerts = store(tmp_path_factory.mktemp("run") / "run", rules, series, news)
    assert plain(replay(run, rules).alerts) == plain(alerts)
    assert plain(run.alerts) == plain(alerts)


def test_a_lost_proof_is_lost_in_the_replay_too(tmp_path: Path) -> None:
    """Live and replayed the held rank of layer0 is unknown from step 2 on; layer1 fires by its own held one."""
    rule = Rule("r", "info", "qk_rank_ratio > 0 and logit_max > 50", scope="layer")
    news = {0: covered(2), 2: [Coverage("layer0", "logits_only"), *covered(2)[1:]]}
    series: list[Step] = [(0, sample(0, layers=2), {})]
    series += [(step, sample(step, layers=2, qk_rank_ratio=np.nan, logit_max=60.0), {}) for step in (2, 4)]
    run, alerts = store(tmp_path / "run", [rule], series, news)
    assert [(each.place, each.fired_step) for each in alerts] == [("layer1", 2)]
    assert plain(replay(run, [rule]).alerts) == plain(alerts)


def test_two_lines_of_one_step_are_two_questions(tmp_path: Path) -> None:
    """A rule that counts losses counts both, though the step is one."""
    rule = Rule("r", "info", "loss > 1", hold=2)
    run, alerts = store(tmp_path / "run", [rule], [(5, None, {"loss": 2.0}), (5, None, {"loss": 3.0})])
    assert [each.fired_step for each in alerts] == [5]
    assert plain(replay(run, [rule]).alerts) == plain(alerts)


def test_a_replay_sees_what_was_there_when_the_run_was_opened(tmp_path: Path) -> None:
    rule = Rule("r", "info", "loss > 1")
    writer = RunWriter(tmp_path / "run", {"metrics": [], "rules": []})
    writer.scalars(0, {"loss": 0.0})
    run = open_run(tmp_path / "run")
    writer.scalars(1, {"loss": 2.0})
    writer.close()
    assert replay(run, [rule]).alerts == ()
    assert [each.fired_step for each in replay(open_run(tmp_path / "run"), [rule]).alerts] == [1]


def test_a_rule_about_what_was_not_recorded_is_refused(tmp_path: Path) -> None:
    run = falling(tmp_path / "run")
    with pytest.raises(UsageError, match=r"^run '.*run': rule 'r', when: column 1: no name 'sink_mass'"):
        replay(run, [Rule("r", "info", "sink_mass < 2")])


def test_stored_rules_of_another_version_are_refused(tmp_path: Path) -> None:
    run = falling(tmp_path / "run")
    run.rules = ({**run.rules[0], "quorum": 2},)
    with pytest.raises(UsageError, match=r"^run '.*run': rule 'sparse_low_rank': no key 'quorum'.*; give rules of"):
        rules_of(run)


# --- leads, scores, changes -------------------------------------------------------------------------------------------


def test_lead_and_divergence_worked_out(tmp_path: Path) -> None:
    """Below .3 from step 290 (at 280 it is .3 exactly); the third sample is 310, 8 steps after the onset at 302.

    entropy_collapse asks for less than .5, from step 210 on, twice: it fires at 220, 82 steps before.
    """
    replayed = replay(falling(tmp_path / "run", diverges=True), load_rules())
    assert replayed.divergence == 302
    assert replayed.leads == {"entropy_collapse": 82, "sparse_low_rank": -8}
    assert replayed.lead == 82


def test_without_a_rule_about_the_loss_the_default_one_judges(tmp_path: Path) -> None:
    run = falling(tmp_path / "run", diverges=True)
    replayed = replay(run, [Rule("mine", "warning", "entropy_ratio < 0.5")])
    assert (replayed.divergence, replayed.leads) == (302, {"mine": 302 - 210})
    assert [each.rule for each in replayed.alerts] == ["mine"]
    early = Rule("loss_divergence", "critical", "loss > 4")
    assert replay(run, [early]).divergence == 300


def test_what_has_a_lead() -> None:
    """A standing warning about attention has one; info, coverage, the loss itself and what had resolved have none."""
    stands = alert("stands", pending_step=10, fired_step=20)
    gone = alert("gone", fired_step=20, state="resolved", resolved_step=99)
    late = alert("late", fired_step=130, severity="warning", state="resolved", resolved_step=180)
    info, blind = alert("info", fired_step=20, severity="info"), alert("uncovered_layers", fired_step=0)
    never = alert("never", state="resolved", fired_step=None, resolved_step=30)
    every = [stands, gone, late, info, blind, never, divergence(100, 140), divergence(300, 340)]
    assert onset(every) == 100
    assert leads(every, 100) == {"stands": 80, "late": -30}
    assert leads(every, 100, ["late"]) == {"late": -30}
    assert leads(every, None) == {}


def test_score_counts_runs() -> None:
    outcomes = [
        Outcome(True, 100, True), Outcome(True, 40, True), Outcome(True, 10, True),
        Outcome(True, 0, True), Outcome(True, -5, True), Outcome(True, None, False),
        Outcome(False, None, True), Outcome(False, None, False),
    ]  # fmt: skip
    total = score(outcomes)
    assert (total.diverged, total.detected, total.others, total.alarmed) == (6, 3, 2, 1)
    assert (total.median, total.least) == (40, 10)
    assert score([])._asdict() == dict.fromkeys(("diverged", "detected", "others", "alarmed"), 0) | {
        "median": None,
        "least": None,
    }


def test_changes_pair_the_alerts_of_a_rule_and_place_in_order() -> None:
    def at(rule: str, place: str, step: int | None) -> Alert:
        return alert(rule, place=place, pending_step=0, fired_step=step)

    before = [at("a", "model", 10), at("a", "model", 50), at("b", "x", 20), at("b", "y", 20), at("c", "model", None)]
    now = [at("a", "model", 10), at("a", "model", 40), at("a", "model", 70), at("b", "y", 5), at("c", "model", 90)]
    assert changes(before, now) == [
        Change("b", "y", 20, 5),
        Change("b", "x", 20, None),
        Change("a", "model", 50, 40),
        Change("a", "model", None, 70),
        Change("c", "model", None, 90),
    ]
    assert changes(before, before) == []
