"""`attnwatch replay`: what it prints, as words and as JSON, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.made_series import falling

from attnwatch.monitor import cli
from attnwatch.monitor.predictors import predictors
from attnwatch.monitor.rules import Rule


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(falling(tmp_path / "bad", diverges=True).path), str(falling(tmp_path / "good", falls=False).path)]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["replay", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    assert "\x1b" not in out
    return out


def words(text: str) -> list[str]:
    """Lines with single blanks."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_one_run_in_words(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = words(said(capsys, runs[0]))
    assert lines[0] == f"{runs[0]}: 40 samples; the loss diverged at step 302"
    for line in (
        "entropy_collapse warning 220 1 firing 82",
        "sparse_low_rank critical 310 1 firing -8",
        "loss_divergence critical 341 1 firing",
        "entropy_ratio < 0.3 310 -8",
        "grad_norm > 3 * lowest(grad_norm) 203 99",
        "entropy_collapse fires 220 82 warning",
        "the loss diverges 302",
        "spread_ratio > 3 30 272",
        "qk_rank_ratio < 0.5 past its line from the start",
        "logit_max > 100 did not cross",
        "qk_energy_top10 > 0.9 not measured",
    ):
        assert line in lines
    assert any("proves nothing" in line for line in lines)


def test_several_runs_end_in_a_table_and_a_sentence(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = words(said(capsys, *runs))
    assert "bad 302 entropy_collapse 220 82 spread_ratio 30" in lines
    assert "no alert fired" in lines
    assert lines[-1].startswith(
        "Detected before the loss diverged: 1 of 1 diverged runs (lead: median 82 steps, least 82"
    )
    assert "Of the 1 runs that did not diverge, 0 had a warning" in lines[-1]


def test_other_rules_are_compared_with_what_was_recorded(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = Path(cli.__file__).with_name("default_rules.toml").read_text()
    file = tmp_path / "mine.toml"
    file.write_text(default)
    assert "Against what was recorded: nothing differs." in said(capsys, runs[0], "--rules", str(file))
    changed = default.replace(
        "entropy_ratio < 0.3 and qk_rank_ratio < 0.5", "entropy_ratio < 0.4 and qk_rank_ratio < 0.5"
    )
    changed = changed.replace('"entropy_collapse"', '"renamed"')
    file.write_text(changed)
    lines = words(said(capsys, runs[0], "--rules", str(file)))
    assert "sparse_low_rank model 310 270 40 steps earlier" in lines
    assert "entropy_collapse model 220 fired only then" in lines
    assert "renamed model 220 fires only now" in lines


def test_json_has_all_of_it(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\nname = "mine"\nseverity = "warning"\nwhen = "entropy_ratio < 0.5"\nhold = 1\n')
    made = json.loads(said(capsys, *runs, "--rules", str(file), "--json"))
    bad, good = made["runs"]
    assert (bad["run"], bad["samples"], bad["divergence_step"], bad["lead"]) == ("bad", 40, 302, 92)
    assert [each["rule"] for each in bad["alerts"]] == ["mine"]
    assert {"rule": "mine", "place": "model", "before": None, "now": 210} in bad["changes"]
    assert {each["name"] for each in good["crossings"]} == {rule.name for rule in predictors()}
    assert made["score"] == {"diverged": 1, "detected": 1, "others": 1, "alarmed": 1, "median": 92, "least": 92}
    assert json.loads(said(capsys, *runs, "--json"))["runs"][0]["changes"] is None


def test_a_sweep_in_words_and_as_json(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = words(said(capsys, *runs, "--sweep", "entropy_ratio=0.3:0.5:2"))
    assert "entropy_collapse 0.5 1 of 1 1 of 1 82 82" not in lines  # healthy heads here have a rank of .75
    assert "entropy_collapse 0.5 1 of 1 0 of 1 82 82" in lines
    assert "sparse_low_rank 0.3 0 of 1 0 of 1" in lines
    made = json.loads(said(capsys, *runs, "--sweep", "entropy_ratio=0.3:0.5:2", "--json"))["sweep"]
    assert [(each["rule"], each["value"]) for each in made] == [
        ("sparse_low_rank", 0.3), ("sparse_low_rank", 0.5), ("entropy_collapse", 0.3), ("entropy_collapse", 0.5),
        ("attention_uniform", 0.3), ("attention_uniform", 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--rules", "nowhere.toml"], "nowhere.toml: expected a file of rules"),
        (["--sweep", "x=1"], "--sweep: expected METRIC=a:b:n"),
        (["nowhere"], "expected a run directory at 'nowhere'"),
    ],
)
def test_wrong_use_is_one_line(
    runs: list[str], arguments: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", runs[0], *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"attnwatch: {found}")


@pytest.mark.parametrize("more", [[], ["--sweep", "entropy_ratio=0.1:0.5:2"]])
def test_a_rule_about_what_was_not_recorded_names_its_file(
    runs: list[str], more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\nname = "mine"\nseverity = "warning"\nwhen = "entropy_ratio < 0.2 and entropi > 1"\n')
    assert cli.main(["replay", *runs, "--rules", str(file), *more]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"attnwatch: {file}: run '{runs[0]}': rule ")


def test_a_hostile_name_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = Rule("r", "warning", "entropy_ratio < 0.5", scope="layer")
    run = falling(tmp_path / "[red]x", rules=[hostile])
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\nname = "other"\nseverity = "info"\nwhen = "entropy_ratio < 0.1"\n')
    assert "[red]x: 40 samples" in said(capsys, str(run.path), str(run.path), "--rules", str(file))


def test_replaying_starts_without_torch(runs: list[str]) -> None:
    script = (
        "import sys; from attnwatch.monitor.cli import main; "
        f"code = main(['replay', {runs[0]!r}]); print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 False\n"


@pytest.mark.parametrize("more", [[], ["--sweep", "spread_ratio=3:8:2"], ["--json"]], ids=str)
def test_a_reader_that_has_seen_enough_is_no_failure(more: list[str], runs: list[str]) -> None:
    """`attnwatch replay RUN | head -1`: 1 would say that an alert fired."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "attnwatch", "replay", *runs, *more]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
