"""What a trainer reads in its own log."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import pytest

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.outputs.log import LogOutput, status
from attnwatch.monitor.sample import Coverage, Problem, Update

EMPTY = Update(0, None, False, {}, (), (), (), (), 0, 0.0)
FIRED = Alert(
    rule="sparse_low_rank",
    severity="critical",
    state="firing",
    place="model",
    pending_step=1160,
    fired_step=1200,
    resolved_step=None,
    share=0.3125,
    heads=(("h.3", 5), ("h.1", 0)),
    values={"entropy_ratio": 0.12345678, "qk_rank_ratio": 0.5},
    summary="Attention is collapsing.",
    advice="Lower the rate.",
)


def lines(log: pytest.LogCaptureFixture, *updates: Update) -> list[tuple[str, str]]:
    """Level and text of what one output logs."""
    output = LogOutput()
    with log.at_level(logging.DEBUG, "attnwatch"):
        for update in updates:
            output.write(update)
        output.close()
    return [(record.levelname, record.getMessage()) for record in log.records]


def test_an_alert_that_fires_is_one_line_with_its_evidence(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, replace(EMPTY, changed=(FIRED,))) == [
        (
            "CRITICAL",
            "attnwatch: critical: sparse_low_rank at model firing at step 1200 "
            "(entropy_ratio 0.1235, qk_rank_ratio 0.5, 31% of heads, worst h.3/5 h.1/0). "
            "Attention is collapsing. Lower the rate",
        )
    ]


def test_an_alert_without_evidence_or_advice_says_no_more(caplog: pytest.LogCaptureFixture) -> None:
    bare = replace(FIRED, severity="info", heads=(), values={}, summary="", advice="")
    expected = "attnwatch: info: sparse_low_rank at model firing at step 1200"
    assert lines(caplog, replace(EMPTY, changed=(bare,))) == [("INFO", expected)]


def test_an_alert_of_one_head_names_it_once(caplog: pytest.LogCaptureFixture) -> None:
    one = replace(FIRED, severity="warning", place="h.3/5", share=1.0, heads=(("h.3", 5),), summary="", advice="")
    expected = (
        "attnwatch: warning: sparse_low_rank at h.3/5 firing at step 1200 (entropy_ratio 0.1235, qk_rank_ratio 0.5)"
    )
    assert lines(caplog, replace(EMPTY, changed=(one,))) == [("WARNING", expected)]


def test_it_resolves_at_the_level_it_fired_at(caplog: pytest.LogCaptureFixture) -> None:
    resolved = replace(FIRED, state="resolved", resolved_step=1300)
    expected = "attnwatch: critical: sparse_low_rank at model resolved at step 1300 (fired at step 1200)"
    assert lines(caplog, replace(EMPTY, changed=(resolved,))) == [("CRITICAL", expected)]


def test_what_never_fired_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """Neither while it is pending nor when that passes, and a standing alert is not repeated."""
    pending = replace(FIRED, state="pending", fired_step=None)
    passed = replace(pending, state="resolved", resolved_step=1180)
    standing = replace(EMPTY, alerts=(FIRED,))
    assert lines(caplog, replace(EMPTY, changed=(pending,)), replace(EMPTY, changed=(passed,)), standing) == []


def test_each_problem_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Problem(40, "h.2", "no attention call seen"), Problem(60, "webhook", "refused")
    updates = [replace(EMPTY, problems=problems) for problems in [(first,), (first,), (first, second)]]
    assert lines(caplog, *updates) == [
        ("WARNING", "attnwatch: h.2: no attention call seen (step 40)"),
        ("WARNING", "attnwatch: webhook: refused (step 60)"),
    ]


def test_full_coverage_is_said_once_after_the_first_sample(caplog: pytest.LogCaptureFixture) -> None:
    before = replace(EMPTY, coverage=(Coverage("h.0", "uncovered"), Coverage("h.1", "uncovered")))
    after = replace(EMPTY, samples=1, coverage=(Coverage("h.0", "verified"), Coverage("h.1", "verified")))
    expected = [("INFO", "attnwatch: 2 of 2 attention layers verified")]
    assert lines(caplog, before, after, replace(after, samples=2)) == expected


def test_layers_that_are_not_seen_are_named_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    blind = tuple(Coverage(f"h.{i}", "uncovered") for i in range(2, 12))
    coverage = (Coverage("h.0", "verified"), Coverage("h.1", "logits_only"), *blind)
    assert lines(caplog, replace(EMPTY, samples=1, coverage=coverage)) == [
        (
            "WARNING",
            "attnwatch: 1 of 12 attention layers verified, 1 logits_only (h.1), "
            "10 uncovered (h.2, h.3, h.4, h.5, h.6, h.7, h.8, h.9 and 2 more)",
        )
    ]


def test_nothing_is_said_of_coverage_before_any_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run counts the samples of the earlier one; a model in which no attention is seen is named a problem."""
    assert lines(caplog, replace(EMPTY, samples=7)) == []


def test_a_hostile_name_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """No line break, terminal escape or text direction of a name reaches the terminal, and no % is formatted."""
    name = "h\n\r\x1b[2J\u2028\u202e\ud800%s é"
    update = replace(EMPTY, problems=(Problem(1, name, "x"),))
    assert lines(caplog, update) == [
        ("WARNING", "attnwatch: h\\n\\r\\x1b[2J\\u2028\\u202e\\ud800%s é: x (step 1)"),
    ]


def test_a_printed_monitor_keeps_hostile_names_in_their_lines() -> None:
    """A lone surrogate could not even be printed."""
    name, plain = "h\n\x1b[2J\ud800", "h\\n\\x1b[2J\\ud800"
    alerts = (replace(FIRED, place=name),)
    text = status(f"step 3, recorded in {name}", (Coverage(name, "uncovered"),), alerts, (Problem(1, name, name),))
    assert text.splitlines() == [
        f"attnwatch: 0 of 1 attention layers verified, 1 uncovered ({plain})",
        f"  step 3, recorded in {plain}",
        f"  alert: critical sparse_low_rank at {plain} since step 1200",
        f"  problem: {plain}: {plain}",
    ]
    text.encode()


def test_without_any_logging_set_up_warnings_reach_stderr_and_nothing_is_printed() -> None:
    code = """
from attnwatch.monitor.outputs.log import LogOutput
from attnwatch.monitor.sample import Problem, Update
LogOutput().write(Update(5, None, False, {}, (), (), (), (Problem(5, "h.0", "gone"),), 0, 0.0))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("", "attnwatch: h.0: gone (step 5)\n")
