"""What the default rules say of made runs whose answer is known."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.made_samples import COLLAPSED, HEALTHY, METRICS, NAN, Heads, covered, sample, told

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Engine, load_rules, parse_rules
from attnwatch.monitor.sample import Coverage, Sample


def only(*names: str) -> Engine:
    """An engine of these default rules."""
    return Engine([rule for rule in load_rules() if rule.name in names], METRICS)


def begun(*names: str) -> Engine:
    """The same after one healthy sample: the rules of collapse ask what a head has lost since."""
    engine = only(*names)
    assert told(engine, [sample(-1)]) == []
    return engine


def first_alert(engine: Engine, rule: str) -> Alert:
    return next(alert for alert in engine.alerts if alert.rule == rule)


def test_healthy_run_raises_nothing() -> None:
    """No default rule speaks of healthy heads, covered layers and a falling loss."""
    engine = Engine(load_rules(), METRICS)
    for step in range(200):
        assert engine.on_scalars(step, {"loss": 4.0 - step / 100, "grad_norm": 1.0}) == ()
        if step % 20 == 0:
            assert engine.on_sample(sample(step), covered(), {"loss": 4.0}) == ()
    assert engine.alerts == ()


def test_collapse_in_a_quarter_of_the_heads() -> None:
    """From the third sample on 4 of 16 heads are sparse and low-rank: warning a sample later, critical two later."""
    bad = {(2, 0): COLLAPSED, (2, 1): COLLAPSED | {"entropy_ratio": 0.0}, (3, 2): COLLAPSED, (3, 3): COLLAPSED}
    engine = Engine(load_rules(), METRICS)
    series = [sample(step, bad if step >= 40 else None) for step in range(0, 120, 20)]
    assert told(engine, series) == [
        "40 sparse_low_rank model pending",
        "40 entropy_collapse model pending",
        "60 entropy_collapse model firing",
        "80 sparse_low_rank model firing",
    ]
    alert = first_alert(engine, "sparse_low_rank")
    assert (alert.pending_step, alert.fired_step, alert.resolved_step, alert.share) == (40, 80, None, 0.25)
    assert alert.heads == (("layer2", 1), ("layer2", 0), ("layer3", 2), ("layer3", 3))
    expected = {"entropy_ratio": 0.0, "qk_rank_ratio": 0.2, "spread_ratio": 12.0, "first_key_mass": 0.3}
    assert alert.values == pytest.approx(expected)
    assert alert.summary.startswith("25% of the heads are sparse and low-rank; the worst, layer2/1, has 0.00 of")
    assert "before step 40" in alert.advice


def test_below_a_quarter_is_quiet_and_recovery_resolves() -> None:
    """3 of 16 heads are not enough; after 4 of 16 it takes five quiet samples to resolve."""
    four = dict.fromkeys([(0, 0), (0, 1), (0, 2), (0, 3)], COLLAPSED)
    three = dict.fromkeys([(0, 0), (0, 1), (0, 2)], COLLAPSED)
    engine = begun("sparse_low_rank")
    assert told(engine, [sample(step, three) for step in range(10)]) == []
    series = [sample(10 + i, four if letter == "x" else three) for i, letter in enumerate("xxx....x.....")]
    assert told(engine, series) == [
        "10 sparse_low_rank model pending",
        "12 sparse_low_rank model firing",
        "22 sparse_low_rank model resolved",
    ]


def test_sinks_are_exempt() -> None:
    """Heads whose first key explains the sparsity do not count, however many they are."""
    engine = begun("sparse_low_rank", "entropy_collapse", "benign_sparsity")
    sink = COLLAPSED | {"first_key_mass": 0.9}
    assert told(engine, [sample(step, **sink) for step in range(6)]) == []


@pytest.mark.parametrize(
    ("spread", "told_of"),
    [(6.9, set()), (7.1, {"entropy_collapse"}), (8.1, {"entropy_collapse", "sparse_low_rank"})],
)
def test_sharp_heads_are_no_collapse_until_their_logits_run_away(spread: float, told_of: set[str]) -> None:
    """Sparse and low-rank, as trained heads may be: what counts is how far beyond the spread that one key needs."""
    engine = begun("sparse_low_rank", "entropy_collapse")
    told(engine, [sample(step, **COLLAPSED | {"spread_ratio": spread}) for step in range(6)])
    assert {alert.rule for alert in engine.alerts} == told_of


def test_missing_heads_are_not_counted_as_healthy() -> None:
    """2 bad heads of 16 are too few; when only 6 of the 16 are known, they are a third."""
    bad = {(0, 0): COLLAPSED, (0, 1): COLLAPSED}
    missing: Heads = {(row, column): {} for row in (1, 2, 3) for column in range(4) if (row, column) < (3, 2)}
    engine = begun("sparse_low_rank")
    assert told(engine, [sample(step, bad) for step in range(5)]) == []
    assert told(engine, [sample(5 + i, {**bad, **missing}) for i in range(3)]) == [
        "5 sparse_low_rank model pending",
        "7 sparse_low_rank model firing",
    ]
    assert first_alert(engine, "sparse_low_rank").share == pytest.approx(2 / 6)


def test_nothing_known_neither_advances_nor_resolves() -> None:
    """Samples of NaN between bad ones stand still, and do not count as quiet."""
    engine = begun("sparse_low_rank")
    nothing: Heads = {(row, column): {} for row in range(4) for column in range(4)}
    series = [
        sample(i, **COLLAPSED) if letter == "x" else sample(i, nothing) if letter == "?" else sample(i)
        for i, letter in enumerate("x?xx????....?.")
    ]
    assert told(engine, series) == [
        "0 sparse_low_rank model pending",
        "3 sparse_low_rank model firing",
        "13 sparse_low_rank model resolved",
    ]


def test_spectrum_of_every_fifth_sample_is_held() -> None:
    """The last known rank counts between two measurements of the weights, in heads that are seen."""
    engine = begun("sparse_low_rank")
    series = [sample(i, **COLLAPSED | {"qk_rank_ratio": 0.2 if i % 5 == 0 else NAN}) for i in range(5)]
    assert told(engine, series) == ["0 sparse_low_rank model pending", "2 sparse_low_rank model firing"]


def test_collapse_without_known_weights() -> None:
    """Where no rank was ever measured, a warning asks for more entropy lost and more spread; nothing is critical."""
    engine = only("sparse_low_rank", "entropy_collapse")
    assert told(engine, [sample(-1, qk_rank_ratio=NAN)]) == []
    unknown = COLLAPSED | {"qk_rank_ratio": NAN}
    series = [sample(i, **unknown | {"spread_ratio": 9.5 if i < 5 else 10.5}) for i in range(8)]
    assert told(engine, series) == ["5 entropy_collapse model pending", "6 entropy_collapse model firing"]


@pytest.mark.parametrize(("factor", "fires"), [(1.0, False), (2.9, False), (3.1, True)])
def test_heads_that_began_sharp_are_no_news(factor: float, fires: bool) -> None:
    """Sharpness of the first sample, built in or trained, is a collapse only when the spread grows threefold."""
    engine = only("sparse_low_rank", "entropy_collapse")
    begun_at = COLLAPSED["spread_ratio"]
    told(engine, [sample(i, **COLLAPSED | {"spread_ratio": begun_at * (factor if i else 1)}) for i in range(5)])
    assert {alert.rule for alert in engine.alerts} == ({"sparse_low_rank", "entropy_collapse"} if fires else set())


def test_uniform_attention_needs_structure_before_it() -> None:
    """Half of the heads above 0.9 after a median of five below 0.7: told at the third; uniform all along: quiet."""
    half = {(row, column): HEALTHY | {"entropy_ratio": 0.95} for row in (0, 1) for column in range(4)}
    engine = only("attention_uniform")
    series = [sample(i, None if i < 5 else half) for i in range(8)]
    assert told(engine, series) == ["5 attention_uniform model pending", "7 attention_uniform model firing"]
    assert told(only("attention_uniform"), [sample(i, entropy_ratio=0.97) for i in range(20)]) == []


def test_sinks_lost_is_judged_against_the_past() -> None:
    """Heads at 0.8 on their first key, then at 0.1: the median of five follows at the third; never sinks: quiet."""
    engine = only("sinks_lost")
    series = [sample(i, first_key_mass=0.8 if i < 6 else 0.1) for i in range(12)]
    assert told(engine, series) == ["8 sinks_lost model pending", "10 sinks_lost model firing"]
    assert told(only("sinks_lost"), [sample(i, first_key_mass=0.4 if i < 6 else 0.0) for i in range(20)]) == []


def test_benign_sparsity_is_information() -> None:
    """Sparse heads of full rank raise the one rule that says so."""
    engine = Engine(load_rules(), METRICS)
    benign = COLLAPSED | {"qk_rank_ratio": 0.9}
    assert told(engine, [sample(i, **benign) for i in range(4)])[-1] == "2 benign_sparsity model firing"
    assert {(alert.rule, alert.severity) for alert in engine.alerts} == {("benign_sparsity", "info")}


def test_logit_growth_names_the_layer_of_one_head() -> None:
    """One head above 100, 1,000 and 10,000 raises one alert each, of rising severity, in its layer."""
    engine = Engine(load_rules(), METRICS)
    series = [sample(i, {(1, 3): HEALTHY | {"logit_max": 2e4}}) for i in range(2)]
    assert [line for line in told(engine, series) if "firing" in line] == [
        "1 logit_growth layer1 firing",
        "1 logit_growth_1e3 layer1 firing",
        "1 logit_growth_1e4 layer1 firing",
    ]
    assert [alert.severity for alert in engine.alerts] == ["info", "warning", "critical"]
    assert all(alert.heads == (("layer1", 3),) for alert in engine.alerts)
    assert first_alert(engine, "logit_growth").values == {"logit_max": 20_000.0}


def test_bound_reached_needs_saturation() -> None:
    """A healthy head may touch the bound of its QK-norm; a saturated one at its bound is told."""
    engine = only("bound_reached")
    assert told(engine, [sample(i, bound_use=0.99) for i in range(5)]) == []
    saturated = COLLAPSED | {"bound_use": 0.99}
    assert told(engine, [sample(5 + i, **saturated) for i in range(3)])[-1] == "7 bound_reached model firing"


@pytest.mark.parametrize(
    ("dtype", "fine", "beyond"),
    [
        ("float16", 2047.0, 2048.0),  # relative step 2**-10: 2 from 2048 on
        ("bfloat16", 255.0, 256.0),  # 2**-7
        ("float32", 2.0**24 - 2, 2.0**24),  # 2**-23
        ("", 1e30, None),
    ],
)
def test_precision(dtype: str, fine: float, beyond: float | None) -> None:
    """Logits two steps of their type apart are told; of an unknown type nothing is claimed."""
    engine = only("precision")
    known = covered(dtype=dtype)
    assert told(engine, [sample(i, logit_max=fine) for i in range(3)], known) == []
    if beyond is not None:
        lines = told(engine, [sample(3 + i, {(0, 0): {"logit_max": beyond}}) for i in range(2)], known)
        assert lines == ["3 precision layer0 pending", "4 precision layer0 firing"]


def test_precision_of_float16_products() -> None:
    """At head size 1024 the product behind a logit of 1,100 is 35,200, more than half of 65,504."""
    engine = only("precision")
    known = [Coverage("layer0", "verified", 4, 4, 1024, dtype="float16")]
    assert told(engine, [sample(i, layers=1, logit_max=1000.0) for i in range(3)], known) == []
    assert len(told(engine, [sample(3, layers=1, logit_max=1100.0)], known)) == 1


def test_nonfinite_fires_at_once_for_one_head() -> None:
    """One NaN logit is enough, and the head with most of them is named first."""
    engine = only("nonfinite")
    heads = {(0, 1): HEALTHY | {"nonfinite": 1.0}, (3, 0): HEALTHY | {"nonfinite": 7.0}}
    assert told(engine, [sample(0), sample(20, heads)]) == ["20 nonfinite model firing"]
    assert first_alert(engine, "nonfinite").heads == (("layer3", 0), ("layer0", 1))


def test_uncovered_layers() -> None:
    """A layer of which nothing is known is told at the first sample, and so is that it is seen at last."""
    engine = only("uncovered_layers")
    known = [*covered(3), Coverage("layer3", "uncovered")]
    assert told(engine, [sample(0, layers=3)], known) == ["0 uncovered_layers model firing"]
    assert engine.alerts[0].summary.startswith("nothing is known of 1 attention layers")
    assert told(engine, [sample(1)]) == ["1 uncovered_layers model resolved"]


def test_a_model_without_any_seen_layer() -> None:
    """A sample of no layers raises nothing but that they are uncovered."""
    engine = Engine(load_rules(), METRICS)
    empty = Sample(0, 0.0, ("logit_max",), (), np.empty((1, 0, 0), dtype=np.float32))
    assert told(engine, [empty], [Coverage("a", "uncovered")]) == ["0 uncovered_layers model firing"]


def test_the_rule_about_sinks_at_a_longer_context() -> None:
    """Logits within 4 leave one of 131,072 keys 1 / (1 + 131071 / e^8) = 0.022; within 8: 0.985; no norm: no answer."""
    page = (Path(__file__).parent.parent / "docs" / "rules.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (rule,) = parse_rules(tomllib.loads(block)["rule"])
    for mass, bound, fires in (
        (0.7, 4.0, True),
        (0.7, 8.0, False),
        (0.99, 8.0, True),
        (0.2, 4.0, False),
        (0.7, NAN, False),
    ):
        engine = Engine([rule], METRICS)
        told(engine, [sample(0, first_key_mass=mass, logit_bound=bound)])
        assert bool(engine.alerts) is fires, (mass, bound)


def losses(engine: Engine, series: Sequence[float], start: int = 0) -> list[str]:
    """What changed, one "step state" for each, from a loss passed at every step."""
    steps = enumerate(series, start)
    return [f"{step} {alert.state}" for step, loss in steps for alert in engine.on_scalars(step, {"loss": loss})]


def test_loss_divergence_worked_out() -> None:
    """Loss 2 until step 29, then 4: the mean of 20 rises by 0.1 a step and passes 2.3 with the fourth, at step 33."""
    engine = only("loss_divergence")
    assert losses(engine, [2.0] * 30 + [4.0] * 60) == ["33 pending", "72 firing"]  # 33 + 39
    assert engine.alerts[0].pending_step == 33
    # Back at 2 from step 90: the mean is 4 - 0.1 a step; 2.3 at step 106 is no longer above. 40 quiet steps to 145.
    assert losses(engine, [2.0] * 60, start=90) == ["145 resolved"]


def test_loss_of_nan_fires_at_once() -> None:
    """No 20 steps, no 40 in a row: not finite is enough."""
    engine = only("loss_divergence")
    assert losses(engine, [2.0, NAN]) == ["1 firing"]
    assert (engine.alerts[0].pending_step, engine.alerts[0].fired_step) == (1, 1)
    assert math.isnan(engine.alerts[0].values["loss"])
    assert losses(only("loss_divergence"), [2.0, math.inf]) == ["1 firing"]
