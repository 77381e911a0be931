"""How the engine asks a rule: of whom, how often, and what the alert names."""

from __future__ import annotations

import numpy as np
import pytest
from tests.made_samples import METRICS, Heads, covered, sample, told

from attnwatch.monitor.rules import LAYER_FACTS, Engine, Rule, load_rules
from attnwatch.monitor.sample import Coverage, Sample


def test_scalar_rules_count_the_steps_that_passed_their_scalars() -> None:
    """A step without the scalar is not a step of the rule, and a sample is none either."""
    engine = Engine([Rule("r", "info", "scalar.tokens > 5", hold=2)], METRICS)
    assert engine.on_scalars(1, {"tokens": 9.0})[0].state == "pending"
    assert engine.on_scalars(2, {"loss": 1.0}) == ()
    assert engine.on_sample(sample(2), covered(), {"tokens": 9.0}) == ()
    fired = engine.on_scalars(3, {"tokens": 9.0})[0]
    assert (fired.state, fired.place, fired.heads, fired.values) == ("firing", "model", (), {"scalar.tokens": 9.0})


def test_mixed_rules_use_the_last_known_scalars() -> None:
    """A rule over heads and the loss is asked once a sample, with the loss last passed."""
    engine = Engine([Rule("r", "info", "loss > 3 and entropy_ratio < 0.5")], METRICS)
    assert engine.on_scalars(1, {"loss": 4.0}) == ()
    assert engine.on_sample(sample(1), covered(), {})[0].state == "firing"


def test_scope_head_names_the_head() -> None:
    """Each head has its own alert; the share of its scope plays no part."""
    engine = Engine([Rule("r", "info", "logit_max > 100", scope="head", share=0.5, hold=2, keep=1)], METRICS)
    one, two = {(1, 0): {"logit_max": 200.0}}, {(1, 0): {"logit_max": 200.0}, (3, 3): {"logit_max": 150.0}}
    assert told(engine, [sample(0, one), sample(1, two), sample(2)]) == [
        "0 r layer1/0 pending",
        "1 r layer1/0 firing",
        "1 r layer3/3 pending",
        "2 r layer1/0 resolved",
        "2 r layer3/3 resolved",
    ]
    assert [alert.place for alert in engine.alerts] == ["layer1/0"]  # the other never fired and is forgotten
    assert engine.alerts[0].share == 1.0


def test_scope_layer_counts_within_the_layer() -> None:
    """Half of one layer's heads is half of the layer, an eighth of the model."""
    heads = {(2, 0): {"logit_max": 200.0}, (2, 3): {"logit_max": 300.0}}
    by_layer = Engine([Rule("r", "info", "logit_max > 100", scope="layer", share=0.5)], METRICS)
    by_model = Engine([Rule("r", "info", "logit_max > 100", scope="model", share=0.5)], METRICS)
    assert told(by_layer, [sample(0, heads)]) == ["0 r layer2 firing"]
    assert told(by_model, [sample(0, heads)]) == []
    assert by_layer.alerts[0].heads == (("layer2", 3), ("layer2", 0))


def test_padding_of_narrow_layers_is_no_head() -> None:
    """A head that was never measured does not count, not even where the condition is about not being known."""
    engine = Engine([Rule("r", "info", "not finite(entropy_ratio)", share=0.5)], METRICS)
    padding: Heads = {(row, column): {} for row in range(4) for column in (1, 2, 3)}
    assert told(engine, [sample(0, padding)]) == []
    gone: Heads = padding | {(row, 0): {} for row in range(2)}
    assert told(engine, [sample(1, gone)]) == ["1 r model firing"]


def test_layers_that_come_later_or_in_another_order() -> None:
    """A head is known by its layer's name, wherever the sample has it; a new layer starts with no past."""
    engine = Engine([Rule("r", "info", "logit_max > 2 * start(logit_max)", scope="layer", share=0)], METRICS)

    def of(step: int, **logit_max: float) -> Sample:
        values = np.array([[[x] for x in logit_max.values()]], dtype=np.float32)
        return Sample(step, 0.0, ("logit_max",), tuple(logit_max), values)

    series = [of(0, a=1.0), of(1, b=9.0, a=1.5), of(2, a=3.0, c=9.0, b=9.0), of(3, c=9.0)]
    assert told(engine, series, []) == ["2 r a firing"]
    assert told(engine, [of(4, b=19.0, c=9.0, a=3.0)], []) == ["4 r b firing"]


def test_at_once_over_heads() -> None:
    """A share of heads for which at_once holds fires without waiting; exempt heads do not."""
    rule = Rule("r", "info", "logit_max > 100", "first_key_mass > 0.5", "logit_max > 500", share=0.5, hold=3)
    engine = Engine([rule], METRICS)
    assert told(engine, [sample(0, logit_max=600.0, first_key_mass=0.9), sample(1, logit_max=200.0)]) == [
        "1 r model pending"
    ]
    assert told(engine, [sample(2, logit_max=600.0)]) == ["2 r model firing"]
    assert engine.alerts[0].pending_step == 1


def test_many_heads_are_capped() -> None:
    """Of 80 bad heads 64 have an alert of their own and one more says that there are 16 others."""
    engine = Engine([Rule("r", "info", "logit_max > 100", scope="head", hold=2, keep=1)], METRICS)
    bad = sample(0, layers=20, logit_max=200.0)
    assert len(engine.on_sample(bad, (), {})) == 65
    assert len(engine.on_sample(bad, (), {})) == 65
    assert len(engine.alerts) == 65
    rest = engine.alerts[-1]
    assert (rest.place, rest.state, rest.share, rest.heads[0]) == ("model", "firing", 0.2, ("layer16", 0))
    assert rest.summary.startswith("16 more places than the 64")
    assert len(engine.on_sample(sample(1, layers=20), (), {})) == 65
    assert {alert.state for alert in engine.alerts} == {"resolved"}


def test_layer_facts() -> None:
    """What coverage says of a layer, NaN while it is unknown."""
    known = [
        Coverage("layer0", "verified", 8, 2, 64, dtype="bfloat16"),
        Coverage("layer1", "logits_only", 4, 4, 32, dtype="float16"),
        Coverage("layer2", "logits_only"),
    ]
    rules = [Rule(f"{name}{i}", "info", f"{name} == {name}", scope="layer") for i, name in enumerate(LAYER_FACTS)]
    engine = Engine(rules, METRICS)
    engine.on_sample(sample(0), known, {})
    found = {(alert.place, *alert.values): next(iter(alert.values.values())) for alert in engine.alerts}
    assert found == {
        ("layer0", "heads"): 8,
        ("layer0", "kv_heads"): 2,
        ("layer0", "head_dim"): 64,
        ("layer0", "dtype_eps"): 2**-7,
        ("layer0", "dtype_max"): 3.39e38,
        ("layer1", "heads"): 4,
        ("layer1", "kv_heads"): 4,
        ("layer1", "head_dim"): 32,
        ("layer1", "dtype_eps"): 2**-10,
        ("layer1", "dtype_max"): 65504,
    }


@pytest.mark.parametrize("state", ["logits_only", "uncovered"])
def test_spectra_of_weights_that_are_no_longer_proved_are_unknown(state: str) -> None:
    """A held rank goes with the proof of its layer and comes back when it is measured again; others are kept."""
    engine = Engine([Rule("r", "info", "qk_rank_ratio > 0 and logit_max > 5", scope="layer")], METRICS)
    lost = [Coverage("layer0", state), *covered()[1:]]
    assert told(engine, [sample(0, layers=2, logit_max=1.0)]) == []
    assert told(engine, [sample(1, layers=2, qk_rank_ratio=np.nan)], lost) == ["1 r layer1 firing"]
    assert told(engine, [sample(2, layers=2, qk_rank_ratio=np.nan)]) == []
    assert told(engine, [sample(3, layers=2)]) == ["3 r layer0 firing"]


def test_sample_facts() -> None:
    """Layers are counted by their state; measured ones are verified or logits only."""
    states = ["verified", "verified", "logits_only", "uncovered"]
    known = [Coverage(f"layer{i}", state) for i, state in enumerate(states)]
    rule = Rule("r", "info", "measured_layers == 3 and logits_only_layers == 1 and uncovered_layers == 1")
    assert told(Engine([rule], METRICS), [sample(0)], known) == ["0 r model firing"]


def test_two_engines_agree() -> None:
    """The same samples give equal alerts: nothing depends on the clock or on chance."""
    rng = np.random.default_rng(0)
    runs = []
    values = [np.exp(3 * rng.normal(size=(len(METRICS), 4, 4))).astype(np.float32) for _ in range(30)]
    for _ in range(2):
        engine = Engine(load_rules(), METRICS)
        for step, v in enumerate(values):
            engine.on_scalars(step, {"loss": float(v[0, 0, 0])})
            names = tuple(metric.name for metric in METRICS)
            engine.on_sample(Sample(step, 0.0, names, ("a", "b", "c", "d"), v), covered(), {})
        runs.append(engine.alerts)
    assert len(runs[0]) > 3
    assert runs[0] == runs[1]
