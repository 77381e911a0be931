"""The verdict of a run and its page: what it says, that it stays small and inert, and that a real browser shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests import made_runs
from tests.pages import Page

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage, Sample, UsageError
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.reports import compare, html, summary, worst

WORST = "worst in blocks.9.attention head 1"


def small_run(
    path: Path, *alerts: Alert, layers: tuple[Coverage, ...] = (), samples: int = 3, ends: bool = True
) -> Run:
    """A run of one layer, `samples` samples ten steps apart, and a loss; healthy but for the alerts given."""
    writer = RunWriter(path, made_runs.header(("entropy_ratio",)))
    made_runs.write_coverage(writer, list(layers) or [Coverage("layer", "verified", 2, 2, 8)])
    for index in range(samples):
        writer.sample(
            Sample(10 * index, 100.0 + index, ("entropy_ratio",), ("layer",), np.full((1, 1, 2), 0.6, "f4"), 0.1)
        )
        writer.scalars(10 * index, {"loss": 2.0})
    for alert in alerts:
        made_runs.write_alert(writer, alert)
    if ends:
        made_runs.write_end(writer, 10 * samples, samples)
    writer.close()
    return open_run(path)


def test_lead_runs_from_firing_to_the_onset_of_divergence(collapsed: Run) -> None:
    """Onset 688 (not 728, where the rule fired); the warning fired at 520, the critical alert at 540."""
    assert summary.leads(collapsed) == {"entropy_collapse": 168, "sparse_low_rank": 148}
    assert (summary.lead(collapsed), summary.onset(collapsed)) == (168, 688)


def test_summary_is_strict_json_with_the_alert_fields(collapsed: Run) -> None:
    made = json.loads(json.dumps(summary.summarize(collapsed), allow_nan=False))
    assert made["verdict"] == {
        "state": "diverged",
        "sentence": "The loss diverged from step 688; attention had given warning 168 steps before (29% of the heads, "
        "worst in blocks.11.attention head 0).",
    }
    assert (made["samples"], made["last_step"], made["coverage"]["verified"]) == (81, 800, 12)
    assert made["main_alert"]["rule"] == "sparse_low_rank"
    assert made["main_alert"]["advice"] == made_runs.ADVICE
    assert set(made["alerts"][0]) == set(Alert.__dataclass_fields__)


@pytest.mark.parametrize(
    ("fired", "lead", "words"),
    [
        (90, 10, "attention had given warning 10 steps before (29% of the heads, worst in blocks.9.attention head 1)"),
        (99, 1, "attention had given warning 1 step before (29% of the heads, worst in blocks.9.attention head 1)"),
        (100, 0, "the alert on attention came at that very step"),
        (130, -30, "the alert on attention came 30 steps after"),
    ],
)
def test_a_late_alert_is_said_to_be_late(tmp_path: Path, fired: int, lead: int, words: str) -> None:
    alert = made_runs.alert(pending_step=fired - 5, fired_step=fired)
    run = small_run(tmp_path / "run", alert, made_runs.divergence(100, 140))
    assert summary.lead(run) == lead
    assert summary.verdict(run) == ("diverged", f"The loss diverged from step 100; {words}.")


def test_an_alert_that_resolved_before_the_divergence_predicts_nothing(tmp_path: Path) -> None:
    early = made_runs.alert(pending_step=10, fired_step=20, resolved_step=60, state="resolved")
    run = small_run(tmp_path / "run", early, made_runs.divergence(100, 140))
    assert summary.lead(run) is None
    assert "no alert of attention collapse stood at that step" in summary.verdict(run)[1]
    assert html.headline(run) == ("100", "the step from which the loss diverged")


def test_an_alert_that_never_fired_changes_no_verdict(tmp_path: Path) -> None:
    pending = made_runs.alert(state="resolved", fired_step=None, resolved_step=30)
    run = small_run(tmp_path / "run", pending)
    assert summary.verdict(run) == ("healthy", "Healthy: attention stayed clear of every alarm.")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("collapsed", f"Attention collapsed at step 540 (29% of the heads, {WORST}); the loss has not diverged.")),
        (
            {"state": "resolved", "resolved_step": 600, "heads": ()},
            ("collapsed", "Attention collapsed at step 540 and recovered by step 600."),
        ),
        ({"rule": "nonfinite", "place": "blocks.9.attention"}, ("critical", f"nonfinite fired at step 540 ({WORST}).")),
        (
            {"rule": "entropy_collapse", "severity": "warning", "share": float("nan")},
            ("warning", f"entropy_collapse warned at step 540 ({WORST}); the loss has not diverged."),
        ),
        ({"severity": "info"}, ("healthy", "Healthy: attention stayed clear of every alarm.")),
        (
            {"rule": "uncovered_layers", "severity": "warning"},
            ("healthy", "Healthy: attention stayed clear of every alarm."),
        ),
    ],
)
def test_verdict_of_one_alert(tmp_path: Path, changes: dict[str, object], expected: tuple[str, str]) -> None:
    assert summary.verdict(small_run(tmp_path / "run", made_runs.alert(**changes))) == expected


def test_layers_that_were_not_covered_weaken_the_verdict(tmp_path: Path) -> None:
    layers = (Coverage("layer", "verified"), Coverage("b", "uncovered"), Coverage("c", "logits_only"))
    run = small_run(tmp_path / "run", layers=layers)
    words = "Healthy, as far as seen: 1 of 3 layers was not covered and 1 of 3 layers gave no spectrum."
    assert summary.verdict(run) == ("healthy", words)


@pytest.mark.parametrize(
    ("layers", "samples", "reason"),
    [
        ((), 0, "no sample was recorded"),
        (
            (Coverage("a", "uncovered"), Coverage("b", "uncovered")),
            2,
            "none of its 2 attention layers could be measured",
        ),
    ],
)
def test_a_run_that_was_not_measured_is_never_healthy(
    tmp_path: Path, layers: tuple[Coverage, ...], samples: int, reason: str
) -> None:
    run = small_run(tmp_path / "run", layers=layers, samples=samples)
    assert summary.verdict(run) == ("unknown", f"Could not tell whether attention is healthy: {reason}.")
    assert "A run that was not measured is not a healthy one" in html.render([run])


def test_fewer_samples_than_an_alarm_needs_are_unknown(tmp_path: Path) -> None:
    """sparse_low_rank holds for 3: two samples cannot make it fire, three can."""
    few = "Could not tell whether attention is healthy: an alarm needs 3 samples in a row, and 2 were recorded."
    assert summary.verdict(small_run(tmp_path / "two", samples=2)) == ("unknown", few)
    assert summary.verdict(small_run(tmp_path / "three", samples=3))[0] == "healthy"


def test_unmeasured_layers_are_the_reason_when_they_left_no_sample(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", layers=(Coverage("a", "uncovered"),), samples=0)
    assert summary.verdict(run)[1].endswith("none of its 1 attention layers could be measured.")


def test_a_rule_that_was_met_but_not_for_long_enough_is_told(tmp_path: Path) -> None:
    coming = made_runs.alert(state="pending", pending_step=20, fired_step=None)
    words = "Healthy, though sparse_low_rank has been met since step 20, not long enough to fire."
    assert summary.verdict(small_run(tmp_path / "run", coming)) == ("healthy", words)


def test_a_loss_that_was_not_passed_is_told(tmp_path: Path) -> None:
    """Nobody knows whether it diverged."""
    sentences = []
    for alerts in ([], [made_runs.alert(heads=())]):
        writer = RunWriter(tmp_path / str(len(alerts)), made_runs.header(("entropy_ratio",)))
        for step in range(3):
            writer.sample(Sample(step, 0.0, ("entropy_ratio",), ("layer",), np.full((1, 1, 2), 0.6, "f4")))
        for alert in alerts:
            made_runs.write_alert(writer, alert)
        made_runs.write_end(writer, 3, 3)
        sentences.append(summary.verdict(open_run(tmp_path / str(len(alerts))))[1])
    assert sentences == [
        "Healthy, as far as seen: no loss was passed.",
        "Attention collapsed at step 540, as far as seen: no loss was passed.",
    ]


@pytest.mark.parametrize(("pending", "advises"), [(90, "sparse_low_rank"), (105, "loss_divergence")])
def test_the_advice_never_leads_back_to_after_the_divergence(tmp_path: Path, pending: int, advises: str) -> None:
    """The loss diverges from 100: to roll back to before an alert that began at 105 would not help."""
    alert = made_runs.alert(pending_step=pending, fired_step=110, advice="Roll back to before the alert.")
    loss = replace(made_runs.divergence(100, 140), advice="Roll back to before the divergence.")
    run = small_run(tmp_path / "run", alert, loss)
    found = summary.advising(run)
    assert found is not None
    assert found.rule == advises
    text = Page(html.render([run])).text
    assert found.advice in text
    assert alert.summary in text


def test_uncovered_layers_are_no_alarm_about_attention(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", made_runs.alert("uncovered_layers", severity="warning", heads=()))
    assert html.headline(run) == ("0", "alarms in 3 samples of 1 layer")
    assert compare.outcomes([run])[0].alerts == 0


def test_samples_without_a_number_are_unknown(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", made_runs.header(("entropy_ratio",)))
    writer.sample(Sample(0, 0.0, ("entropy_ratio",), ("layer",), np.full((1, 1, 2), np.nan, "f4")))
    writer.close()
    assert summary.verdict(open_run(tmp_path / "run"))[0] == "unknown"


def test_page_says_verdict_advice_and_lead_before_anything_else(collapsed: Run) -> None:
    text = Page(html.render([collapsed])).text
    order = ["The loss diverged from step 688", " 168 ", made_runs.ADVICE, "Alerts against the loss", "Every metric"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_page_of_two_runs_compares_their_options(collapsed: Run, healthy: Run) -> None:
    page = Page(html.render([collapsed, healthy]))
    assert re.search(r"qk_norm\s+none\s+rms", page.text)
    assert compare.differences([collapsed, healthy]) == [("option", "qk_norm", ("none", "rms"))]
    assert [attributes.get("class") for tag, attributes in page.tags if "data-plot" in attributes][:3] == [
        "timeline overlay", "timeline", "timeline",
    ]  # fmt: skip


def test_every_picture_has_a_name_and_nothing_handles_events_inline(collapsed: Run) -> None:
    source = html.render([collapsed])
    page = Page(source)
    pictures = [
        attributes
        for tag, attributes in page.tags
        if tag == "svg" and "aria-hidden" not in attributes and attributes.get("class") != "plot"  # a part of one
    ]
    assert len(pictures) > 20
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert source.count("<desc>") == len(pictures)
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_runs_with_little_in_them_make_a_page(tmp_path: Path) -> None:
    """Nothing but a header; then no loss; then unfinished."""
    writer = RunWriter(tmp_path / "empty", made_runs.header())
    writer.close()
    empty = Page(html.render([open_run(tmp_path / "empty")])).text
    assert "no sample was recorded" in empty
    assert "The trainer passed no loss" in empty
    assert "No coverage was recorded" in empty
    unfinished = Page(html.render([small_run(tmp_path / "cut", ends=False)])).text
    assert "still running, or killed at step 20" in unfinished
    assert "Healthy so far" in unfinished


def test_a_loss_that_is_not_finite_is_marked(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", made_runs.header(("entropy_ratio",)))
    for step, loss in enumerate([2.0, 1.0, 90.0, float("nan"), float("inf")]):
        writer.scalars(step, {"loss": loss})
    writer.close()
    text = Page(html.render([open_run(tmp_path / "run")])).text
    assert "not finite from step 3" in text
    assert "loss (log)" in text


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([2.0, float("inf"), 1.9, 1.8], "not finite at 1 step, first 1"),
        ([2.0, float("nan"), 1.9, float("nan"), 1.7], "not finite at 2 steps, first 1"),
        ([float("nan")] * 5, "not finite from step 0"),
    ],
)
def test_a_loss_that_became_finite_again_is_not_said_to_be_lost(tmp_path: Path, losses: list[float], said: str) -> None:
    """And of one that was never finite the words are inside of the picture: they begin at its left edge."""
    writer = RunWriter(tmp_path / "run", made_runs.header(("entropy_ratio",)))
    for step, loss in enumerate(losses):
        writer.scalars(step, {"loss": loss})
    writer.close()
    page = html.render([open_run(tmp_path / "run")])
    assert re.search(rf'text-anchor="start">{said}<', page)


def test_a_resumed_run_says_whose_its_first_alerts_are(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    assert "It goes on from another run" not in html.render([open_run(tmp_path / "run")])
    with (tmp_path / "run" / "events.jsonl").open("a") as events:
        events.write('{"event": "resumed", "step": 0, "state": {"alerts": []}}\n')
    assert "It goes on from another run" in html.render([open_run(tmp_path / "run")])


def test_worst_heads_show_their_value_at_the_step_of_the_alert(collapsed: Run) -> None:
    found = worst.worst_heads(collapsed)
    assert [each.alert.rule for each in found] == ["sparse_low_rank", "entropy_collapse"]
    first = found[0].heads[0]
    index = collapsed.steps.tolist().index(540)
    expected = collapsed.metric("entropy_ratio")[index, collapsed.layers.index(first.layer), first.head]
    assert float(first.cells[0][0]) == pytest.approx(float(expected), rel=0.01)
    assert found[0].moments == (("start", 0), ("alert", 540), ("divergence", 680), ("end", 800))
    assert float(first.values[0][1]) == pytest.approx(float(expected), rel=1e-5)


def test_only_verified_neighbours_share_a_row_of_coverage() -> None:
    layers = [Coverage(name, state) for name, state in zip("abcde", ["verified"] * 3 + ["uncovered"] * 2, strict=True)]
    assert [name for name, _ in html.grouped_coverage(layers)] == ["a to c (3 layers)", "d", "e"]


def test_how_exactly_a_layer_was_proved_parts_no_neighbours() -> None:
    """They are one row, with the largest error of them; another place of the weights is another row."""
    notes = ["rows 0 to 8; to 1e-08", "rows 0 to 8; to 2.5e-07", "rows 0 to 8; to 0e+00", "rows 8 to 16; to 1e-08"]
    layers = [Coverage(name, "verified", note=note) for name, note in zip("abcd", notes, strict=True)]
    rows = [(name, layer.note) for name, layer in html.grouped_coverage(layers)]
    assert rows == [("a to c (3 layers)", notes[1]), ("d", notes[3])]


def test_page_is_written_whole_or_not_at_all(tmp_path: Path, healthy: Run) -> None:
    target = html.write_report([healthy], tmp_path / "report.html")
    assert target.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    for wrong in (tmp_path, tmp_path / "report.html" / "x.html", tmp_path / "missing" / "x.html"):
        with pytest.raises(UsageError, match="expected a place to write the report") as caught:
            html.write_report([healthy], wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="at least one run"):
        html.render([])


def test_a_summary_of_another_program_is_never_overwritten(tmp_path: Path, healthy: Run) -> None:
    """Ours is, of one run or of several."""
    for runs in ([healthy], [healthy, healthy], [healthy]):
        html.write_page_and_summary(runs, tmp_path / "report.html")
    for theirs in ('{"accuracy": 1}', "[]", "{", "3"):
        (tmp_path / "summary.json").write_text(theirs)
        (tmp_path / "report.html").unlink(missing_ok=True)
        with pytest.raises(UsageError, match="expected no other"):
            html.write_page_and_summary([healthy], tmp_path / "report.html")
        assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]
        assert (tmp_path / "summary.json").read_text() == theirs


def test_a_torn_summary_in_a_run_directory_is_made_anew(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    (run.path / "summary.json").write_text('{"format": 1, "ver')
    html.write_page_and_summary([run], run.path / "report.html")
    assert json.loads((run.path / "summary.json").read_text())["run"] == "run"


class LongRun:
    """A run as `Run` shows it, with more numbers than a test should write: `count` samples of 32 layers of 32 heads."""

    path, header, rules = Path("long"), made_runs.header(), tuple(made_runs.RULES)
    layers = tuple(f"model.layers.{index}.self_attn" for index in range(32))
    heads, ended, problems, alerts = 32, True, (), (made_runs.alert(heads=((layers[9], 3),)),)
    scalar_names = ("loss", "grad_norm")
    metrics = tuple(made_runs.metric(name) for name in made_runs.METRICS)
    coverage = tuple(Coverage(name, "verified", 32, 32, 64) for name in layers)
    coverages, unmeasured, intervals, resumed, exception, is_thinned = (), (), (), None, "", False

    def __init__(self, count: int) -> None:
        self.steps = np.arange(count)
        self.times, self.seconds = self.steps * 2.0, np.full(count, 0.02)
        self.noise = np.random.default_rng(0).random((count, 32, 32), dtype=np.float32)

    def metric(self, name: str) -> np.ndarray:
        return self.noise

    def scalar(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(100_000), 2 + np.random.default_rng(1).random(100_000)

    def iter_samples(self) -> Iterator[Sample]:
        yield Sample(0, 0.0, ("entropy_ratio",), self.layers, self.noise[:1])


@pytest.mark.parametrize(("runs", "count"), [(1, 1200), (6, 150), (40, 50)])
def test_page_of_long_runs_stays_under_five_megabytes(runs: int, count: int) -> None:
    """Noise, which neither thins nor compresses well, in all 25 metrics."""
    page = html.render([LongRun(count)] * runs)  # type: ignore[list-item]
    assert len(page.encode()) < 5_000_000
    assert ("Thinned to keep the page small" in page) == (count > 100)
    assert ("Metrics and heads are drawn of the first 6 runs" in page) == (runs > 6)
