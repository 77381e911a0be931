"""The `attnwatch` command as users run it: a process of its own, its exit code, and what it prints."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests import made_runs

from attnwatch.monitor import cli
from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.rules import load_rules
from attnwatch.monitor.store import RunWriter, open_run

COMMAND = Path(sys.executable).with_name("attnwatch")
README = Path(__file__).parent.parent / "README.md"


def run(*arguments: str | Path, cwd: Path | None = None, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def refusal(*arguments: str | Path, cwd: Path | None = None) -> str:
    """The one line of a command that ends with 2 and prints nothing else."""
    done = run(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"attnwatch: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def small(path: Path, *alerts: dict[str, object]) -> Path:
    """A run of four samples with these alerts, that has not ended."""
    made_runs.collapse(path, collapses=False, layers=2, heads=2, steps=30)
    events = path / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if json.loads(line)["event"] != "end"]
    recorded = [made_runs.event("alert", step=20, **vars(made_runs.alert(**changes))) for changes in alerts]  # type: ignore[arg-type]
    events.write_text("".join(f"{line}\n" for line in (*kept, *map(json.dumps, recorded))))
    return path


# --- usage ------------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_the_readme_shows_each() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    commands = re.findall(r"^    (\w+) ", done.stdout, re.MULTILINE)
    assert commands == list(cli.COMMANDS)
    usage = README.read_text(encoding="utf-8")
    assert [command for command in commands if not re.search(rf"^    attnwatch {command} ", usage, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), "COMMAND"),
        (("rport",), "invalid choice: 'rport'"),
        (("report",), "RUN"),
        (("report", "x", "--fail-on", "grave"), "invalid choice: 'grave' (choose from"),
        (("rules", "--output", "x"), "unrecognized arguments"),
    ],
)
def test_wrong_use_is_one_line_that_says_where_help_is(arguments: tuple[str, ...], found: str) -> None:
    line = refusal(*arguments)
    assert found in line
    assert "--help" in line


@pytest.mark.parametrize(
    "arguments",
    [("rules",), ("replay", "RUN"), ("live", "RUN", "--once"), ("export", "RUN", "--csv"), ("scan", "WEIGHTS")],
    ids=lambda arguments: arguments[0],
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """As `attnwatch rules | head -1`: neither a failure nor the 1 of an alert."""
    weights = {f"layers.0.{side}_proj.weight": torch.eye(8) for side in "qk"}
    torch.save(weights, tmp_path / "model.pt")
    places = {"RUN": small(tmp_path / "run"), "WEIGHTS": tmp_path / "model.pt"}
    more = ["--heads", "2"] if "WEIGHTS" in arguments else []
    read, write = os.pipe()
    os.close(read)
    command = [COMMAND, *(places.get(each, each) for each in arguments), *more]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_prints_the_default_file() -> None:
    done = run("rules")
    assert done.returncode == 0
    assert done.stdout == Path(cli.__file__).with_name("default_rules.toml").read_text(encoding="utf-8")


def test_rules_writes_a_file_that_loads_and_overwrites_none(tmp_path: Path) -> None:
    target = tmp_path / "rules.toml"
    assert run("rules", "--out", target).stdout == f"{target}\n"
    assert load_rules(target) == load_rules()
    target.write_text("mine")
    assert "expected a new file" in refusal("rules", "--out", target)
    assert target.read_text() == "mine"
    assert "No such file or directory" in refusal("rules", "--out", tmp_path / "nowhere" / "rules.toml")


# --- report -----------------------------------------------------------------------------------------------------------


def test_the_report_of_one_run_goes_into_its_directory(tmp_path: Path) -> None:
    """Also when run.json is named, and of a run that has not ended."""
    path = small(tmp_path / "mine")
    for argument in (path, path / "run.json"):
        done = run("report", argument)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{path / 'report.html'}\n", "")
        assert "mine" in (path / "report.html").read_text(encoding="utf-8")
        assert json.loads((path / "summary.json").read_text())["last_step"] == 30
        (path / "report.html").unlink()


def test_the_report_of_several_runs_goes_where_it_is_called_or_told(tmp_path: Path) -> None:
    first, second = small(tmp_path / "first"), small(tmp_path / "second")
    assert run("report", first, second, cwd=tmp_path).stdout == "report.html\n"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "first" in page
    assert "second" in page
    assert [summary["run"] for summary in json.loads((tmp_path / "summary.json").read_text())] == ["first", "second"]
    assert run("report", first, second, "-o", tmp_path / "other.html").stdout == f"{tmp_path / 'other.html'}\n"
    assert (tmp_path / "other.html").is_file()
    assert not (first / "report.html").exists()


def test_a_run_that_a_kill_left_is_reported(tmp_path: Path) -> None:
    """Half a record and half a line at the end of its files."""
    path = small(tmp_path / "run")
    for file in (*(path / "samples").iterdir(), path / "scalars.jsonl"):
        file.write_bytes(file.read_bytes()[:-7])
    assert run("report", path).returncode == 0
    assert json.loads((path / "summary.json").read_text())["samples"] == 3


def test_a_directory_stands_for_the_runs_in_it_and_what_is_no_run_is_left_out(tmp_path: Path) -> None:
    """`attnwatch report runs/*` after a demo, whose directory holds a page too; a run deeper down is not meant."""
    for name in ("demo/plain", "demo/qk_norm", "deep/er/run"):
        small(tmp_path / name)
    (tmp_path / "demo" / "report.html").write_text("page")
    (tmp_path / "notes").mkdir()
    for paths, named, skipped in (
        (["demo"], ["plain", "qk_norm"], ""),
        (["demo", "deep/er"], ["plain", "qk_norm", "run"], ""),
        (["demo/plain", "demo/qk_norm", "demo/report.html"], ["plain", "qk_norm"], "demo/report.html"),
        (["deep", "demo", "notes"], ["plain", "qk_norm"], "deep, notes"),
    ):
        for command in (("report", *paths, "-o", "page.html"), ("replay", *paths, "--json")):
            done = run(*command, cwd=tmp_path)
            said = f"attnwatch: left out, no runs: {skipped}\n" if skipped else ""
            assert (done.returncode, done.stderr) == (0, said)
        assert [each["run"] for each in json.loads(done.stdout)["runs"]] == named
        assert [each["run"] for each in json.loads((tmp_path / "page.summary.json").read_text())] == named
    for command in ("report", "replay"):
        assert "found none in deep, notes" in refusal(command, "deep", "notes", cwd=tmp_path)
        assert "found a directory without run.json" in refusal(command, "deep", cwd=tmp_path)
        assert "found a file" in refusal(command, "demo/report.html", cwd=tmp_path)
        assert "'nowhere', found nothing" in refusal(command, "demo", "nowhere", cwd=tmp_path)


def test_a_report_overwrites_pages_only(tmp_path: Path) -> None:
    path = small(tmp_path / "run")
    (path / "page.htm").write_text("old")
    (path / "Page.HTML").write_text("old")
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and "age" not in file.name}
    assert len(kept) == 4
    for file in kept:
        assert "expected a page (.html) or a new file" in refusal("report", path, "-o", file)
    assert {file: file.read_bytes() for file in path.rglob("*") if file in kept} == kept
    assert not (path / "summary.json").exists()
    for name in ("page.htm", "Page.HTML", "new", "new.txt"):
        assert run("report", path, "-o", path / name).returncode == 0
        assert (path / name).read_text().startswith("<!DOCTYPE html>")


def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    good = small(tmp_path / "good")
    assert "found nothing" in refusal("report", tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "without run.json" in refusal("report", tmp_path / "empty")
    shutil.copytree(good, tmp_path / "half")
    header = (good / "run.json").read_bytes()
    (tmp_path / "half" / "run.json").write_bytes(header[: len(header) // 2])
    assert "restore it or leave it out" in refusal("report", good, tmp_path / "half", "-o", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert "expected a place to write the report" in refusal("report", good, "-o", tmp_path / "no" / "page.html")


@pytest.mark.parametrize(
    ("alerts", "failing"),
    [
        ([], []),
        ([{"severity": "info"}], ["info"]),
        ([{"severity": "warning"}], ["info", "warning"]),
        ([{"severity": "critical"}], ["info", "warning", "critical"]),
        ([{"severity": "critical", "state": "resolved", "resolved_step": 25}], ["info", "warning", "critical"]),
        ([{"severity": "critical", "state": "pending", "fired_step": None}], []),
    ],
    ids=["none", "info", "warning", "critical", "resolved", "pending"],
)
def test_fail_on_is_exit_code_1_for_alerts_as_grave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alerts: list[dict[str, object]], failing: list[str]
) -> None:
    """Of any of the runs, and whether or not the alert has resolved; the page is written all the same."""
    quiet, path = small(tmp_path / "quiet"), small(tmp_path / "run", *alerts)
    page = tmp_path / "page.html"
    for severity in SEVERITIES:
        code = cli.main(["report", str(quiet), str(path), "-o", str(page), "--fail-on", severity])
        assert (severity, code) == (severity, int(severity in failing))
    assert capsys.readouterr().out == f"{page}\n" * len(SEVERITIES)
    assert cli.main(["report", str(path), "-o", str(page)]) == 0


def test_fail_on_reaches_the_shell(tmp_path: Path) -> None:
    path = small(tmp_path / "run", {"severity": "critical"})
    assert run("report", path, "--fail-on", "critical").returncode == 1


@pytest.mark.parametrize("command", [["report", "run"], ["rules"]])
def test_reports_and_rules_start_without_torch(tmp_path: Path, command: list[str]) -> None:
    small(tmp_path / "run")
    script = (
        "import sys; from attnwatch.monitor.cli import main; "
        f"code = main({command!r}); print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 False\n"


def test_a_hostile_name_is_printed_as_it_is(tmp_path: Path) -> None:
    """Square brackets are no markup and a percent sign is no format."""
    path = small(tmp_path / "[bold]%s")
    assert run("report", path).stdout == f"{path / 'report.html'}\n"
    assert "[red]%d" in refusal("report", tmp_path / "[red]%d")


# --- demo -------------------------------------------------------------------------------------------------------------


def test_the_demo_writes_into_no_used_directory(tmp_path: Path) -> None:
    RunWriter(tmp_path / "used", made_runs.header()).close()
    assert "expected a new or empty directory" in refusal("demo", "--out", tmp_path / "used")


def test_on_a_terminal_the_demo_shows_progress_and_an_interrupt_keeps_the_run(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    demo = subprocess.Popen(
        [COMMAND, "demo", "--out", tmp_path / "demo"], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    shown, asked = b"", False
    with suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(leader, 4096):
            shown += part
            if not asked and re.search(rb"[1-9]\d*/800", shown):
                asked = True
                demo.send_signal(signal.SIGINT)
    os.close(leader)
    assert demo.wait(timeout=60) == 130, shown
    assert b"attnwatch: stopped; what was recorded is kept" in shown
    assert b"Traceback" not in shown
    kept = open_run(tmp_path / "demo" / "plain")
    assert kept.ended
    assert kept.steps[0] == 0


def test_the_whole_demo_attention_warns_before_the_loss_and_qk_norm_stays_silent(tmp_path: Path) -> None:
    """A minute of real training. Not a terminal: plain lines, no bars, no escapes."""
    done = run("demo", "--out", tmp_path / "demo", timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout

    plain, qk_norm = (open_run(tmp_path / "demo" / name) for name in ("plain", "qk_norm"))
    assert [a.rule for a in qk_norm.alerts if a.severity != "info"] == []
    fired = {a.rule: a for a in plain.alerts}
    warning, alert, divergence = (fired[rule] for rule in ("entropy_collapse", "sparse_low_rank", "loss_divergence"))
    assert warning.fired_step is not None
    assert alert.fired_step is not None
    assert warning.fired_step < alert.fired_step < divergence.pending_step
    for each in (plain, qk_norm):
        assert {layer.state for layer in each.coverage} == {"verified"}
        assert len(each.layers) == 12
        assert each.problems == ()
        assert each.steps.tolist() == list(range(0, 800, 10))

    lines = done.stdout.splitlines()
    told = f"  step {alert.fired_step}: critical: sparse_low_rank: "
    assert [line for line in lines if line.startswith(told)] != []
    fates = [
        f"plain    entropy_collapse fired at step {warning.fired_step}, "
        f"{divergence.pending_step - warning.fired_step} steps ahead",
        f"sparse_low_rank fired at step {alert.fired_step}, {divergence.pending_step - alert.fired_step} steps ahead",
        f"the loss diverged at step {divergence.pending_step}",
    ]
    assert [line for line in lines if line.startswith("; ".join([*fates, "final loss "]))] != []
    assert [line for line in lines if line.startswith("qk_norm  no alert; the loss did not diverge; final loss ")] != []
    assert lines[-1].endswith(f" s; the report on both: {tmp_path / 'demo' / 'report.html'}")
    assert "sparse_low_rank" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["report", "replay", "live", "export", "scan", "thin"])
def test_a_path_that_the_system_refuses_is_one_line_in_our_words(command: str, tmp_path: Path) -> None:
    """A name longer than any file's; a directory that may not be entered says the same, but not to root."""
    more = {"export": ("--csv",), "thin": ("-o", tmp_path / "thin")}.get(command, ())
    said = refusal(command, "a" * 300, *more, cwd=tmp_path)
    assert said.startswith("attnwatch: expected ")
    assert "File name too long" in said
    assert "Errno" not in said
