"""What the page says of a run beside its charts: header, comparison, spectra; and that no file's content breaks it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import made_runs
from tests.pages import Page
from tests.slow_crossings import first_crossings

from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Sample
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.reports import compare, facts, html, spectra, summary, worst
from attnwatch.reports.crossings import crossings

SPECTRUM = ("qk_energy_top1", "qk_energy_top10", "qk_directions_90", "qk_rank")


def with_header(path: Path, **changes: object) -> Run:
    """A run of three samples whose header was changed afterwards."""
    writer = RunWriter(path, made_runs.header(("entropy_ratio",)))
    for step in range(3):
        writer.sample(Sample(step, float(step), ("entropy_ratio",), ("a",), np.full((1, 1, 2), 0.5, "f4")))
        writer.scalars(step, {"loss": 2.0})
    made_runs.write_end(writer, 3, 3)
    header = json.loads((path / "run.json").read_text()) | changes
    (path / "run.json").write_text(json.dumps({key: value for key, value in header.items() if value is not ...}))
    return open_run(path)


WORDS = st.sampled_from(["<marquee>", "{{ 7 }}", "sparse_low_rank", 10**400])
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda below: (
        st.lists(below, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "when", "revision", "x"]), below, max_size=2)
    ),
    max_leaves=5,
)
KEYS = ("model", "parameters", "attnwatch", "created", "versions", "options", "git", "source")
HEADERS = st.dictionaries(st.sampled_from(KEYS), ODD, max_size=5)
RULES = st.lists(st.dictionaries(st.sampled_from(["name", "severity", "when", "share"]), ODD, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return with_header(tmp_path_factory.mktemp("runs") / "run")


@settings(max_examples=20, derandomize=True, deadline=None)
@given(HEADERS, RULES)
def test_any_header_makes_a_page_and_no_element(plain_run: Run, changes: dict[str, object], rules: list[dict]) -> None:
    """Every value that JSON can hold, in every place: a page, and nothing of it becomes an element."""
    kept = plain_run.header, plain_run.rules
    try:
        plain_run.header, plain_run.rules = {**kept[0], **changes}, tuple(rules)
        page = Page(html.render([plain_run, plain_run]))
    finally:
        plain_run.header, plain_run.rules = kept
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "marquee" not in {tag for tag, _ in page.tags}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"revision": "abc123", "dirty": False}, "abc123"),
        ({"revision": "abc123", "dirty": True}, "abc123, with changes that were not committed"),
        (None, "not recorded"),
        (..., "not recorded"),
        ("abc", "not recorded"),
    ],
)
def test_git_revision_stands_among_the_facts(tmp_path: Path, found: object, words: str) -> None:
    run = with_header(tmp_path / "run", git=found)
    assert facts.facts(run).about["git revision"] == words
    assert f"git revision {words}" in Page(html.render([run])).text


def test_what_differs_is_named_options_first(tmp_path: Path) -> None:
    runs = [
        with_header(tmp_path / "a", options={"every": 10, "rows": 64}, git={"revision": "one", "dirty": False}),
        with_header(
            tmp_path / "b", options={"every": 20, "rows": 64, "context": 9}, parameters=7, versions={"torch": "3"},
        ),
    ]  # fmt: skip
    found = {row.name: (row.kind, row.values) for row in compare.differences(runs)}
    assert list(found)[:2] == ["every", "context"]
    assert found["every"] == ("option", ("10", "20"))
    assert found["context"] == ("option", ("not set", "9"))
    assert found["parameters"] == ("model", ("1,234,567", "7"))
    assert found["git revision"] == ("model", ("one", "not recorded"))
    assert found["torch"] == ("version", ("2.13.0", "3"))
    assert "rows" not in found


def test_a_rule_that_differs_is_shown_with_both_wordings(tmp_path: Path) -> None:
    looser = [{**made_runs.RULES[0], "share": 0.5}, *made_runs.RULES[1:]]
    runs = [with_header(tmp_path / "a"), with_header(tmp_path / "b", rules=looser)]
    (row,) = compare.differences(runs)
    assert (row.kind, row.name) == ("rule", "sparse_low_rank")
    assert ["share 0.25" in row.values[0], "share 0.5" in row.values[1]] == [True, True]


def test_runs_that_recorded_the_same_of_themselves_are_said_to(tmp_path: Path) -> None:
    runs = [with_header(tmp_path / name) for name in "ab"]
    assert compare.differences(runs) == []
    assert "Nothing that the runs recorded of themselves" in Page(html.render(runs)).text


def test_table_of_verdicts(collapsed: Run, healthy: Run) -> None:
    first, second = compare.outcomes([collapsed, healthy])
    assert first[:7] == (
        "plain", "diverged", "sparse_low_rank", 540, "29% of the heads, worst in blocks.11.attention head 0", 688, 168,
    )  # fmt: skip
    assert second[:8] == ("qknorm", "healthy", "", None, "", None, None, 0)
    assert first.loss == pytest.approx(collapsed.scalar("loss")[1][-20:].mean())


def test_saved_weights_alone_are_never_healthy(tmp_path: Path) -> None:
    read = [{"step": 0, "path": "a.pt", "step_from": "order"}, {"step": 1, "path": "<b>.pt", "step_from": "order"}]
    run = with_header(tmp_path / "run", source="checkpoints", checkpoints=read)
    state, sentence = summary.verdict(run)
    assert state == "unknown"
    assert sentence.startswith("Could not tell from weights alone whether attention is healthy")
    page = Page(html.render([run])).text
    assert "Watch a few steps of the run itself" in page
    assert "saved weights, read without running the model: 2 checkpoints, the last one <b>.pt; steps are their" in page
    assert html.headline(run) == ("?", "weights alone cannot tell")


def test_runs_of_one_name_are_told_apart_by_what_is_above_them(tmp_path: Path) -> None:
    runs = [with_header(tmp_path / folder / "run") for folder in ("x/a", "y/a")]
    assert facts.names(runs) == ["x/a/run", "y/a/run"]
    assert facts.names(runs[:1]) == ["run"]
    assert [row.run for row in compare.outcomes(runs)] == ["x/a/run", "y/a/run"]
    assert facts.names([runs[0], runs[0]]) == ["run", "run"]  # the same one twice


def test_intervals_that_a_budget_chose_are_told(tmp_path: Path) -> None:
    """The newest five; a run without a budget says nothing of them."""
    run = with_header(tmp_path / "run")
    assert "from sample to sample" not in html.render([run])
    with (tmp_path / "run" / "events.jsonl").open("a") as events:
        for number in range(7):
            line = {"event": "interval", "step": 1000 * number, "interval": 20 + number, "share": 0.0125}
            events.write(json.dumps(line) + "\n")
    assert (
        "2 changes before these; every 22 from step 2,000 (1.2%); every 23 from step 3,000 (1.2%); "
        "every 24 from step 4,000 (1.2%); every 25 from step 5,000 (1.2%); every 26 from step 6,000 (1.2%)."
    ) in html.render([open_run(tmp_path / "run")])


def test_a_scan_has_no_share_of_a_time_that_nobody_knows(tmp_path: Path) -> None:
    """Its samples have the times of their files, hours or seconds apart."""
    assert math.isnan(facts.cost(with_header(tmp_path / "scan", source="checkpoints")).share)
    assert facts.cost(with_header(tmp_path / "run")).share == 0.0


def test_saved_weights_that_a_rule_objects_to_say_so(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", made_runs.header(("qk_rank_ratio",)) | {"source": "checkpoints"})
    writer.sample(Sample(9, 0.0, ("qk_rank_ratio",), ("a",), np.full((1, 1, 2), 0.1, "f4")))
    made_runs.write_alert(
        writer, made_runs.alert("low_rank", severity="warning", fired_step=9, heads=(("a", 1),), share=0.5)
    )
    writer.close()
    state, sentence = summary.verdict(open_run(tmp_path / "run"))
    assert (state, sentence) == ("warning", "low_rank warned at step 9 (50% of the heads, worst in a head 1) so far.")


@pytest.mark.parametrize("losses", [[1e308, -1e308, 1e308], [1e308] * 3, [5e-324, 1e308], [math.inf, -math.inf]])
def test_losses_at_the_edge_of_what_a_float_holds_make_a_page(tmp_path: Path, losses: list[float]) -> None:
    """Their differences overflow; every coordinate stays a number. Huge step numbers too."""
    writer = RunWriter(tmp_path / "run", made_runs.header(("entropy_ratio",)))
    for step, loss in enumerate(losses):
        writer.scalars(2**60 + step, {"loss": loss, "grad_norm": loss})
    writer.close()
    page = html.render([open_run(tmp_path / "run"), open_run(tmp_path / "run")])
    drawn = [value for tag, a in Page(page).tags for key, value in a.items() if key in ("d", "x1", "y1", "x", "y")]
    assert not [value for value in drawn if value and ("nan" in value or "inf" in value)]


def lost(path: Path) -> Run:
    """One head: its spectrum is measured at steps 0 and 40 of 0 to 60, its weights are not proved at 20 and 30."""
    writer = RunWriter(path, made_runs.header(SPECTRUM))
    for step in range(0, 61, 10):
        if step in (0, 20, 40):
            state = "logits_only" if step == 20 else "verified"
            writer.event(
                made_runs.event(
                    "coverage", step=step, layers=[{"name": "a", "state": state, "heads": 1, "head_dim": 16}]
                )
            )
        values = np.array([0.5, 0.95, 5.0, 4.0] if step in (0, 40) else [np.nan] * 4, "f4")[:, None, None]
        writer.sample(Sample(step, float(step), SPECTRUM, ("a",), values))
    made_runs.write_alert(
        writer, made_runs.alert(heads=(("a", 0),), pending_step=20, fired_step=30, values={"qk_rank": 4.0})
    )
    made_runs.write_end(writer, 60, 7)
    return open_run(path)


def test_a_spectrum_that_is_no_longer_proved_is_not_drawn_on(tmp_path: Path) -> None:
    """Known at the start, unknown when the alert fires at 30, known again at the end; charts, maps and tables alike."""
    run = lost(tmp_path / "run")
    (median, head) = spectra.spectra(run)
    assert [row[:2] for row in head.rows] == [("start", 0), ("alert", 30), ("end", 60)]
    assert [row[2] for row in head.rows] == [("0.5", "0.95", "5", "4"), ("",) * 4, ("0.5", "0.95", "5", "4")]
    assert head.picture.count("<circle") == 6
    assert median.title == "median of all heads"
    (heads,) = worst.worst_heads(run)
    assert heads.heads[0].values == (("4", "", "4"),)


def test_a_spectrum_curve_goes_through_the_three_points_that_are_recorded(tmp_path: Path) -> None:
    """One direction .5, five .9 (that is what "directions of 90 %" says), ten .95; x is logarithmic up to 16."""
    (_, head) = spectra.spectra(lost(tmp_path / "run"))
    left, wide, low, tall = (
        spectra.LEFT,
        spectra.WIDTH - spectra.RIGHT - spectra.LEFT,
        spectra.HEIGHT - spectra.BOTTOM,
        138,
    )
    x = [left + wide * math.log(n) / math.log(16) for n in (1, 5, 10)]
    y = [low - tall * share for share in (0.5, 0.9, 0.95)]
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
    assert f'd="{path}"' in head.picture


def test_a_direction_that_holds_more_than_90_percent_is_one_point(tmp_path: Path) -> None:
    """ "One direction holds 90 %" says less than that it holds 96 %: no second point under the first."""
    curve = spectra._curve("end", 1, spectra.Scale(1, 16, 0, 100, log=True), spectra.Scale(0, 1, 100, 0), ENERGY)
    assert curve.count("<circle") == 2
    assert 'd="M0.0 4.0L83.0 0.0"' in curve


def test_crossings_are_those_of_the_rule_engine(collapsed: Run, healthy: Run, tmp_path: Path) -> None:
    """Computed for the whole run at once, and by asking sample by sample."""
    for run in (collapsed, healthy, lost(tmp_path / "run"), with_header(tmp_path / "small")):
        assert crossings(run) == first_crossings(run)
    assert [each.step for each in crossings(collapsed)][:1] != [None]


ENERGY = np.array([0.96, 1.0, 1.0, 1.2])
METRICS = ("entropy_ratio", "qk_rank_ratio", "logit_max")
LEVELS = {"entropy_ratio": (0.1, 0.5), "qk_rank_ratio": (0.2, 0.9), "logit_max": (50.0, 5e3)}


SAMPLES = st.lists(
    st.tuples(*[st.sampled_from("lhn")] * 6, st.sampled_from(["verified", "logits_only", ""])), min_size=3, max_size=14
)
NORMS = st.lists(st.sampled_from([1.0, 2.0, 5.0, math.nan, math.inf]), max_size=12)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(SAMPLES, NORMS)
def test_crossings_of_any_run_are_those_of_the_rule_engine(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[str, ...]], norms: list[float]
) -> None:
    """Two heads, three metrics, each low, high or not measured; coverage that comes and goes; a gradient norm."""
    path = tmp_path_factory.mktemp("runs") / "run"
    writer = RunWriter(path, made_runs.header(METRICS))
    for step, (*letters, state) in enumerate(samples):
        if state:
            writer.event(made_runs.event("coverage", step=step, layers=[{"name": "a", "state": state, "heads": 2}]))
        values = [
            [[math.nan if letter == "n" else LEVELS[name][letter == "h"] for letter in letters[2 * i : 2 * i + 2]]]
            for i, name in enumerate(METRICS)
        ]
        writer.sample(Sample(step, float(step), METRICS, ("a",), np.array(values, "f4")))
    for step, norm in enumerate(norms):
        writer.scalars(step, {"grad_norm": norm})
    writer.close()
    run = open_run(path)
    assert crossings(run) == first_crossings(run)
