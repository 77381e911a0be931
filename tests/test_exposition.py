"""The text that a scrape gets: names, labels and values, read as Prometheus' own tools read it."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.made_updates import EMPTY, HOSTILE, METRICS, Found, alert, full_update, parsed, sample, told

import attnwatch
from attnwatch.hooks.layers import METRICS as ALL_METRICS
from attnwatch.monitor.outputs.exposition import SERIES, Exposition, head_series, metric_series
from attnwatch.monitor.sample import Coverage, Metric, Problem

NAN, INF = math.nan, math.inf


@pytest.fixture
def exposition() -> Exposition:
    return Exposition(METRICS)


def text(exposition: Exposition) -> str:
    return "".join(exposition.text())


def read(exposition: Exposition) -> Found:
    return parsed(text(exposition))


def test_layers_are_exported_as_min_mean_and_max_over_their_heads(exposition: Exposition) -> None:
    """NaN heads are left out, infinite ones are not, and a layer without any value is absent."""
    values = [
        [[1.0, 2.0, 6.0], [NAN, 0.5, 1.5]],
        [[-1.0, INF, 3.0], [NAN, NAN, NAN]],
        [[INF, -INF, 0.0], [4.0, NAN, NAN]],
    ]
    exposition.write(told(EMPTY, sample(40, values)))
    found = read(exposition)
    assert found["attnwatch_entropy"] == {
        ("h.0", "min"): 1.0, ("h.0", "mean"): 3.0, ("h.0", "max"): 6.0,
        ("h.1", "min"): 0.5, ("h.1", "mean"): 1.0, ("h.1", "max"): 1.5,
    }  # fmt: skip
    assert found["attnwatch_logit_max"] == {("h.0", "min"): -1.0, ("h.0", "mean"): INF, ("h.0", "max"): INF}
    rank = found["attnwatch_qk_rank"]
    assert (rank["h.0", "min"], rank["h.0", "max"], rank["h.1", "mean"]) == (-INF, INF, 4.0)
    assert math.isnan(rank["h.0", "mean"])
    assert found["attnwatch_sampled_step"] == {(): 40}


def test_the_help_of_a_metric_is_its_own(exposition: Exposition) -> None:
    exposition.write(told(EMPTY, sample(0, np.ones((3, 2, 2)))))
    helps = {family.name: family.documentation for family in text_string_to_metric_families(text(exposition))}
    assert {metric.help for metric in METRICS} <= set(helps.values())
    assert helps["attnwatch_qk_rank"] == "Effective rank of W_q^T W_k."


def test_numbers_from_the_weights_are_kept_until_measured_again(exposition: Exposition) -> None:
    """Per head, and only those: what comes from the activations is the newest sample's or absent."""
    first = told(EMPTY, sample(0, [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2, [[7.0, 9.0], [3.0, NAN]]]))
    second = told(first, sample(20, [[[NAN, NAN]] * 2, [[4.0, 4.0]] * 2, [[NAN, NAN], [NAN, 5.0]]]))
    third = told(second, sample(40, np.full((3, 2, 2), NAN)))
    for update in (first, replace(first, step=1, is_new=False), second, third, replace(third, is_new=False)):
        exposition.write(update)
    found = read(exposition)
    assert found["attnwatch_qk_rank"] == {
        ("h.0", "min"): 7.0, ("h.0", "mean"): 8.0, ("h.0", "max"): 9.0,
        ("h.1", "min"): 3.0, ("h.1", "mean"): 4.0, ("h.1", "max"): 5.0,
    }  # fmt: skip
    assert "attnwatch_entropy" not in found
    assert "attnwatch_logit_max" not in found


@pytest.mark.parametrize("state", ["logits_only", "uncovered"])
def test_numbers_from_weights_that_are_no_longer_proved_are_absent(exposition: Exposition, state: str) -> None:
    """Until they are measured again; those of the other layer are kept."""
    blank, again = np.full((3, 2, 2), NAN), [[[NAN] * 2] * 2, [[NAN] * 2] * 2, [[3.0] * 2, [NAN] * 2]]
    for values, now, rank in (
        (np.full((3, 2, 2), 7.0), "verified", 7.0),
        (blank, state, None),
        (blank, "verified", None),
        (again, "verified", 3.0),
    ):
        known = Coverage("h.0", now), Coverage("h.1", "verified")
        exposition.write(replace(told(EMPTY, sample(0, values)), coverage=known))
        found = read(exposition)["attnwatch_qk_rank"]
        assert (found.get(("h.0", "max")), found["h.1", "max"]) == (rank, 7.0)


def test_other_layers_start_without_a_past(exposition: Exposition) -> None:
    """A row of another layout is never taken for a layer's own."""
    exposition.write(told(EMPTY, sample(0, np.ones((3, 2, 2)))))
    exposition.write(told(EMPTY, sample(20, np.full((3, 2, 2), NAN), layers=("h.1", "h.2"))))
    assert "attnwatch_qk_rank" not in read(exposition)


def test_before_the_first_update_nothing_is_measured_and_no_alert_fires(exposition: Exposition) -> None:
    assert read(exposition) == {
        "attnwatch_info": {(attnwatch.__version__,): 1},
        "attnwatch_finished": {(): 0},
        "attnwatch_alerts_firing": {("info",): 0, ("warning",): 0, ("critical",): 0},
    }


def test_alerts_by_state_and_by_severity(exposition: Exposition) -> None:
    """An alert that came back counts once, in its newest state."""
    alerts = (
        alert("collapse", "critical", "resolved"),
        alert("growth", "info", "resolved", "h.1/3"),
        alert("collapse", "critical", "firing"),
        alert("collapse", "critical", "firing", "h.0"),
        alert("loss", "warning", "pending"),
    )
    exposition.write(replace(EMPTY, alerts=alerts))
    found = read(exposition)
    assert found["attnwatch_alert_state"] == {  # labels by name: place, rule, severity
        ("model", "collapse", "critical"): 2,
        ("h.0", "collapse", "critical"): 2,
        ("h.1/3", "growth", "info"): 0,
        ("model", "loss", "warning"): 1,
    }
    assert set(found["attnwatch_alert_pending_step"].values()) == {10}
    assert found["attnwatch_alert_pending_step"].keys() == found["attnwatch_alert_state"].keys()
    assert found["attnwatch_alerts_firing"] == {("info",): 0, ("warning",): 0, ("critical",): 2}
    exposition.write(EMPTY)
    assert "attnwatch_alert_state" not in read(exposition)


@pytest.mark.parametrize(("loss", "nonfinite"), [(2.5, 0), (NAN, 1), (INF, 1), (-INF, 1)])
def test_a_loss_that_is_no_number_is_said_as_a_number(exposition: Exposition, loss: float, nonfinite: int) -> None:
    exposition.write(replace(EMPTY, step=7, scalars={"loss": loss}))
    found = read(exposition)
    assert found["attnwatch_loss"][()] == pytest.approx(loss, nan_ok=True)
    assert found["attnwatch_loss_nonfinite"] == {(): nonfinite}
    assert found["attnwatch_step"] == {(): 7}


def test_scalars_have_the_names_that_rules_use(exposition: Exposition) -> None:
    """`loss`, `grad_norm` and `lr` by themselves, any other one by the label of `scalar`."""
    exposition.write(replace(EMPTY, scalars={"lr": 0.1, "grad_norm": 2.0, "tokens": 3e9}))
    found = read(exposition)
    assert found["attnwatch_lr"] == {(): 0.1}
    assert found["attnwatch_grad_norm"] == {(): 2.0}
    assert found["attnwatch_scalar"] == {("tokens",): 3e9}
    assert "attnwatch_loss" not in found
    assert "attnwatch_loss_nonfinite" not in found


def test_coverage_problems_and_cost(exposition: Exposition) -> None:
    coverage = (Coverage("h.0", "verified"), Coverage("h.1", "uncovered"), Coverage("h.2", "verified"))
    problems = (Problem(3, "h.1", "no call seen"), Problem(4, "webhook", "refused"), Problem(9, "h.1", "gone"))
    exposition.write(replace(EMPTY, coverage=coverage, problems=problems, samples=5, seconds=0.25))
    found = read(exposition)
    assert found["attnwatch_layers"] == {("verified",): 2, ("logits_only",): 0, ("uncovered",): 1}
    assert found["attnwatch_layer_coverage"] == {
        ("h.0", "verified"): 1, ("h.1", "uncovered"): 1, ("h.2", "verified"): 1
    }  # fmt: skip
    assert found["attnwatch_problems"] == {(): 3}
    assert found["attnwatch_problem"] == {("h.1",): 2, ("webhook",): 1}
    assert found["attnwatch_samples_total"] == {(): 5}
    assert found["attnwatch_sampling_seconds_total"] == {(): 0.25}
    assert "attnwatch_sampling_share" not in found  # not known yet
    exposition.write(replace(EMPTY, interval=40, share=0.02))
    found = read(exposition)
    assert found["attnwatch_sampling_interval_steps"] == {(): 40}
    assert found["attnwatch_sampling_share"] == {(): 0.02}


def test_every_name_of_the_table_is_exported_and_no_other() -> None:
    """Single heads and the count of those left out where heads were asked for."""
    layers, heads = Exposition(METRICS), Exposition(METRICS, max_heads=9)
    for exposition in (layers, heads):
        exposition.write(full_update(("h.0",)))
    of_layers = {series.name for series in (*SERIES, *map(metric_series, METRICS))}
    of_heads = {head_series(metric).name for metric in METRICS}
    assert set(read(layers)) == of_layers - {"attnwatch_truncated_heads"}
    assert set(read(heads)) == of_layers | of_heads


def test_single_heads_have_names_of_their_own() -> None:
    """So that a query of layers never meets them; a head that does not exist, or was not measured, is absent."""
    exposition = Exposition(METRICS, max_heads=100)
    values = [[[1.0, 0.1], [3.0, NAN]], [[INF, 5.0], [7.0, NAN]], [[NAN, NAN], [9.0, NAN]]]
    exposition.write(told(EMPTY, sample(40, values)))
    found = read(exposition)
    assert found["attnwatch_head_entropy"] == {  # labels by name: head, layer
        ("0", "h.0"): 1.0, ("1", "h.0"): pytest.approx(0.1, rel=1e-8), ("0", "h.1"): 3.0
    }  # fmt: skip
    assert found["attnwatch_head_logit_max"] == {("0", "h.0"): INF, ("1", "h.0"): 5.0, ("0", "h.1"): 7.0}
    assert found["attnwatch_head_qk_rank"] == {("0", "h.1"): 9.0}
    assert found["attnwatch_truncated_heads"] == {(): 0}
    assert found["attnwatch_entropy"]["h.1", "mean"] == 3.0


def test_more_heads_than_the_cap_are_counted_and_left_out() -> None:
    """The first ones stay, layer by layer: the same at every scrape. What is told of layers is of all heads."""
    exposition = Exposition(METRICS, max_heads=3)
    exposition.write(told(EMPTY, sample(40, np.arange(12).reshape(3, 2, 2))))
    found = read(exposition)
    assert found["attnwatch_head_entropy"] == {("0", "h.0"): 0, ("1", "h.0"): 1, ("0", "h.1"): 2}
    assert found["attnwatch_truncated_heads"] == {(): 1}
    assert found["attnwatch_entropy"]["h.1", "max"] == 3


def test_any_two_float32_numbers_are_told_apart(exposition: Exposition) -> None:
    value = np.float32(0.1)
    values = np.full((3, 1, 2), value)
    values[:, :, 1] = np.nextafter(value, np.float32(1))
    exposition.write(told(EMPTY, sample(0, values, ("h.0",))))
    found = read(exposition)["attnwatch_entropy"]
    assert np.float32(found["h.0", "min"]) == value < np.float32(found["h.0", "max"]) == values[0, 0, 1]


def test_labels_of_the_run_stand_on_every_series() -> None:
    """For a file that no discovery gives labels to; help and type of a name are the same whatever they are."""
    plain, labelled = Exposition(METRICS), Exposition(METRICS, labels={"rank": "1", "run": 'a"b'})
    for exposition in (plain, labelled):
        exposition.write(full_update(("h.0",)))
    found = read(labelled)
    assert found["attnwatch_step"] == {("1", 'a"b'): 100}
    assert found["attnwatch_entropy"]["h.0", "1", 'a"b', "max"] == 1.0
    comments = [[line for line in text(each).splitlines() if line[0] == "#"] for each in (plain, labelled)]
    assert comments[0] == comments[1]


def test_the_end_is_told(exposition: Exposition) -> None:
    exposition.write(EMPTY)
    exposition.finish()
    assert read(exposition)["attnwatch_finished"] == {(): 1}


def test_help_texts_stand_as_they_are() -> None:
    """The format would have a backslash or a new line in them escaped."""
    every = (*SERIES, *(metric_series(Metric(*metric)) for metric in ALL_METRICS))
    assert [series.help for series in every if set("\\\n") & set(series.help)] == []


def test_promtool_has_no_complaint(exposition: Exposition, program: Callable[[str], str]) -> None:
    """Names, types and help are what Prometheus asks for, with hostile layers too; node_exporter reads it this way."""
    exposition.write(full_update((*HOSTILE, "h.\ud800")))
    body = text(exposition).encode()
    check = subprocess.run([program("promtool"), "check", "metrics"], input=body, capture_output=True, timeout=60)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_a_name_without_utf8_form_is_written_out(exposition: Exposition) -> None:
    """A module may be called so, and the other layers must still be seen."""
    exposition.write(full_update(("h.\ud800", "h.1")))
    assert read(exposition)["attnwatch_entropy"]["h.\\ud800", "max"] == 1.0
