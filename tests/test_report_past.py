"""What a report says of a run that changed on its way or ended badly: proofs lost, an exception, saved weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests import made_runs
from tests.pages import Page

from attnwatch.monitor.cli import main
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage, Sample
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.reports import facts, html, known, summary
from attnwatch.reports.every import detail_of, every_metric

METRICS = ("entropy_ratio", "qk_rank_ratio")


def covered(name: str, state: str, note: str) -> dict[str, object]:
    return vars(Coverage(name, state, 2, 2, 8, "rms per head", note))


def run_that_lost_its_proofs(path: Path) -> Run:
    """Two layers of two heads, a sample every tenth step to 50. Layer a is not proved from step 30 on, b always is. The
    rank is 0.75 where it is known."""
    writer = RunWriter(path, made_runs.header(METRICS))
    for step in range(0, 60, 10):
        a = ("verified", "W_q = q.weight") if step < 30 else ("logits_only", "no projection makes q")
        if step in (0, 30):
            layers = [covered("a", *a), covered("b", "verified", "W_q = q.weight")]
            writer.event(made_runs.event("coverage", step=step, layers=layers))
        rank = [0.75, 0.75] if step < 30 else [np.nan, 0.75]
        values = np.repeat(np.array([[0.6, 0.6], rank], "f4")[:, :, None], 2, axis=2)
        writer.sample(Sample(step, float(step), METRICS, ("a", "b"), values))
        writer.scalars(step, {"loss": 2.0})
    made_runs.write_end(writer, 50, 6)
    return open_run(path)


def test_what_was_proved_before_stays_and_the_page_says_since_when_it_is_not(tmp_path: Path) -> None:
    """The kind of QK-norm, how the weights were proved, and the step from which on they are not."""
    run = run_that_lost_its_proofs(tmp_path / "run")
    assert {name: proof.until for name, proof in known.proofs(run).items()} == {"a": 30, "b": None}
    assert facts.facts(run).seen["QK-norm"] == ("rms per head (not proved any more in 1 of 2 layers, from step 30 on)")
    said = Page(html.render([run])).text
    assert "verified before step 30 (W_q = q.weight); since then: no projection makes q" in said
    assert summary.verdict(run) == (
        "healthy", "Healthy, as far as seen: 1 of 2 layers gave no spectrum from step 30 on."
    )  # fmt: skip


def test_a_proof_that_came_back_is_no_news(tmp_path: Path) -> None:
    run_that_lost_its_proofs(tmp_path / "run")
    with open(tmp_path / "run" / "events.jsonl", "a") as events:
        line = made_runs.event("coverage", step=50, layers=[covered("a", "verified", "W_q = again")])
        events.write(json.dumps(line) + "\n")
    run = open_run(tmp_path / "run")
    assert known.proofs(run)["a"] == (Coverage(**covered("a", "verified", "W_q = again")), None)
    assert facts.facts(run).seen["QK-norm"] == "rms per head"


def test_maps_of_heads_end_with_their_proof(tmp_path: Path) -> None:
    """At the last frame, which is shown without an alert, layer a has an entropy and no rank: unknown, not the rank
    of before."""
    run = run_that_lost_its_proofs(tmp_path / "run")
    ((shown, _),) = every_metric([run], (0.0, 50.0), detail_of([run])).maps
    assert shown is not None
    assert [heat.metric for heat in shown.maps] == ["entropy_ratio", "qk_rank_ratio"]
    assert (shown.steps[shown.shown], shown.table) == (50, (("a", ("0.6", "")), ("b", ("0.6", "0.75"))))


def test_a_run_that_an_exception_ended_says_so_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one that ended in order, or goes on, does not."""
    for name in ("broken", "sound"):
        made_runs.collapse(tmp_path / name, collapses=False, layers=1, steps=60)
    events = tmp_path / "broken" / "events.jsonl"
    events.write_text(events.read_text().replace('"event": "end"', '"event": "end", "exception": "OutOfMemoryError"'))
    broken, sound = open_run(tmp_path / "broken"), open_run(tmp_path / "sound")
    assert (broken.ended, broken.exception, sound.exception) == (True, "OutOfMemoryError", "")
    assert facts.facts(broken).about["ended"] == "by an exception: OutOfMemoryError"
    assert "ended" not in facts.facts(sound).about
    assert [summary.summarize(run)["exception"] for run in (broken, sound)] == ["OutOfMemoryError", None]
    assert "Ended by an exception: OutOfMemoryError, after step 60." in Page(html.render([broken])).text
    assert "by an exception" not in Page(html.render([sound])).text
    for command, said in (
        (["replay"], "broken: 7 samples; the loss did not diverge; ended by an exception: OutOfMemoryError\n"),
        (["live", "--once"], "The run has ended by an exception: OutOfMemoryError: no sample will come.\n"),
    ):
        assert main([*command, str(broken.path)]) == 0
        assert said in capsys.readouterr().out
        assert main([*command, str(sound.path)]) == 0
        assert "by an exception" not in capsys.readouterr().out
    assert main(["replay", str(broken.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["exception"] == "OutOfMemoryError"


def test_layers_of_saved_weights_are_placed_wherever_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of them was verified: not on the page, in summary.json, nor on the live screen."""
    writer = RunWriter(tmp_path / "scan", made_runs.header(METRICS) | {"source": "checkpoints"})
    made_runs.write_coverage(writer, [Coverage("a", "verified", 2, 2, 8), Coverage("b", "uncovered")])
    writer.sample(Sample(0, 0.0, METRICS, ("a",), np.full((2, 1, 2), 0.75, "f4")))
    made_runs.write_end(writer, 0, 1)
    run = open_run(tmp_path / "scan")
    assert summary.summarize(run)["coverage"] == {"placed": 1, "logits_only": 0, "uncovered": 1}
    rows = Page(html.render([run])).text.partition("What was seen")[2].partition("Cost, options")[0]
    assert "placed 2 2 8" in " ".join(rows.split())
    assert main(["live", "--once", str(tmp_path / "scan")]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 attention layers placed, 1 uncovered (b)" in said
    assert "verified" not in said
    shown = run._repr_html_()
    assert "placed by name and shape: nothing was run" in shown
    assert "0 of 2 attention layers verified" in shown


def test_each_page_of_a_directory_has_a_summary_of_its_own(tmp_path: Path, collapsed: Run, healthy: Run) -> None:
    """Two comparisons and a report leave three summaries, and each one is of its page's runs."""
    for name, runs in (("report", [healthy]), ("one", [collapsed, healthy]), ("two.v2", [healthy, collapsed])):
        html.write_page_and_summary(runs, tmp_path / f"{name}.html")
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found.keys() == {"summary.json", "one.summary.json", "two.v2.summary.json"}
    assert found["summary.json"]["run"] == "qknorm"
    assert [each["run"] for each in found["one.summary.json"]] == ["plain", "qknorm"]
    assert [each["run"] for each in found["two.v2.summary.json"]] == ["qknorm", "plain"]
