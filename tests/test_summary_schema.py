"""summary.json against its documentation: every name and type of the tables in docs/report.md, for every verdict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests import made_runs
from tests.pages import Page
from tests.test_report import small_run

from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.monitor.thin import thin
from attnwatch.reports import html, summary

KINDS = {
    "integer": int,
    "text": str,
    "boolean": bool,
    "object": dict,
    "list": list,
    "alert": dict,
    "number": (int, float),
}


def documented(title: str) -> dict[str, tuple[str, bool]]:
    """Names of a table in docs/report.md: the kind of each, and whether it may be null."""
    text = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    table = text.split(title)[1].split("| name | type | what it is |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    return {
        name.strip("` "): (kind.split()[0], kind.endswith("null")) for names, kind in rows for name in names.split(",")
    }


def differences_from(schema: dict[str, tuple[str, bool]], made: dict[str, object]) -> list[str]:
    wrong = [f"{name}: one has it, the other not" for name in schema.keys() ^ made.keys()]
    for name in schema.keys() & made.keys():
        kind, nullable = schema[name]
        if not (made[name] is None and nullable) and type(made[name]) not in np.atleast_1d(KINDS[kind]):
            wrong.append(f"{name}: {made[name]!r} is no {kind}")
    return wrong


def test_summary_is_what_its_page_says(tmp_path: Path, collapsed: Run, healthy: Run) -> None:
    """Names and types of summary.json, both ways; and the page says the same."""
    page = html.write_page_and_summary([collapsed, healthy], tmp_path / "report.html")
    both = json.loads((tmp_path / "summary.json").read_text())
    whole, alert = documented("## summary.json"), documented("An alert:")
    for made in both:
        assert differences_from(whole, made) == []
        assert [differences_from(alert, each) for each in made["alerts"]] == [[]] * len(made["alerts"])
        assert made["verdict"]["sentence"] in Page(page.read_text()).text
        assert made["format"] == summary.FORMAT
    assert both[0]["main_alert"] in both[0]["alerts"]
    assert differences_from(whole, {**both[0], "run": 3, "new": 1}) != []


def recorded(path: Path, *events: dict[str, object], **header: object) -> Run:
    """A run without samples."""
    writer = RunWriter(path, made_runs.header() | header)
    for event in events:
        writer.event(event)
    writer.close()
    return open_run(path)


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of every state and every way to end, by what they are."""
    place = tmp_path_factory.mktemp("kinds")
    alert = made_runs.alert
    known = {
        "healthy": small_run(place / "healthy"),
        "healthy, killed": small_run(place / "killed", ends=False),
        "unknown, short": small_run(place / "short", samples=1),
        "unknown, empty": recorded(place / "empty"),
        "unknown, blind": small_run(place / "blind", layers=(Coverage("x", "uncovered", note="why"),)),
        "unknown, ended by an exception": recorded(
            place / "broken",
            made_runs.event("problem", step=1, where="x", text="why"),
            made_runs.event("end", step=1, time=0.0, samples=0, seconds=0.0, exception="ValueError"),
        ),
        "warning": small_run(place / "warning", alert("entropy_collapse", severity="warning")),
        "critical": small_run(place / "critical", alert("nonfinite", values={"nonfinite": float("inf")})),
        "critical, of weights": recorded(
            place / "scan", made_runs.event("alert", step=0, **vars(alert("weights_nonfinite"))), source="checkpoints"
        ),
        "collapsed": small_run(place / "collapsed", alert(pending_step=10, fired_step=20)),
        "diverged": small_run(place / "diverged", alert(pending_step=2, fired_step=5), made_runs.divergence(10, 20)),
    }
    thin(known["collapsed"], place / "thin", every=2, around=0)
    return known | {"collapsed, thinned": open_run(place / "thin")}


def test_summary_of_every_kind_of_run_is_as_documented(all_kinds: dict[str, Run], tmp_path: Path) -> None:
    """Strict JSON, the names of the tables and no others, and values of their types."""
    whole, alert = documented("## summary.json"), documented("An alert:")
    for kind, run in all_kinds.items():
        html.write_page_and_summary([run], tmp_path / "report.html")
        made = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
        assert (kind, made["verdict"]["state"]) == (kind, kind.split(",")[0])
        assert (kind, differences_from(whole, made)) == (kind, [])
        assert made["verdict"].keys() == {"state", "sentence"}
        for each in [*made["alerts"], *([made["main_alert"]] if made["main_alert"] else [])]:
            assert (kind, differences_from(alert, each)) == (kind, [])
        best = "placed" if kind.endswith("of weights") else "verified"
        assert made["coverage"].keys() == {best, "logits_only", "uncovered"}
        assert [problem.keys() for problem in made["problems"]] == [{"step", "where", "text"}] * len(run.problems)
    assert {kind.split(",")[0] for kind in all_kinds} == {
        "healthy", "warning", "critical", "collapsed", "diverged", "unknown",
    }  # fmt: skip
