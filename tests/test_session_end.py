"""How a watched run begins and ends, also badly: wrong use, full disks, exits, kills, forks."""

from __future__ import annotations

import copy
import gc
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.recipes import Decoder, forward
from torch import nn

import attnwatch
from attnwatch import open_run

# --- an orderly end ---------------------------------------------------------------------------------------------------


def test_close_writes_the_report_and_may_be_called_twice(model: Decoder, run: Path) -> None:
    monitor = attnwatch.watch(model, run=run, every=1)
    forward(model)
    monitor.step(loss=1.0)
    monitor.close()
    left = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    monitor.close()
    monitor.step(loss=2.0)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == left
    assert {"report.html", "summary.json"} <= {path.name for path in left}
    stored = open_run(run)
    assert (stored.ended, stored.scalar("loss")[1].tolist(), monitor.problems) == (True, [1.0], [])


def test_a_report_can_be_written_while_training_goes_on(model: Decoder, run: Path) -> None:
    with attnwatch.watch(model, run=run, every=1, report=False) as monitor:
        forward(model)
        monitor.step()
        page = monitor.report()
        assert page == run / "report.html"
        assert page.read_text().startswith("<!DOCTYPE html>")


def test_an_exception_ends_the_run_in_order_and_passes(model: Decoder, run: Path) -> None:
    def train() -> None:
        with attnwatch.watch(model, run=run) as monitor:
            forward(model)
            monitor.step(loss=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert open_run(run).ended
    assert (run / "report.html").exists()


def test_the_run_records_what_it_was(model: Decoder, run: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    attnwatch.watch(model, run=run, every=7, rows=None, optimizer=optimizer, stop_on="info", report=False).close()
    header = open_run(run).header
    assert header["model"] == "Decoder"
    assert header["parameters"] == sum(p.numel() for p in model.parameters())
    assert header["versions"]["torch"] == torch.__version__
    given = {"every": 7, "rows": None, "stop_on": "info", "optimizer": "AdamW"}
    chosen = {"spectrum_every": 5, "sequences": 4, "rules": "default", "prometheus": None, "budget": None}
    assert (given | chosen).items() <= header["options"].items()
    assert "sparse_low_rank" in [rule["name"] for rule in header["rules"]]


def test_runs_without_a_name_go_into_runs(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start in the same second too."""
    monkeypatch.chdir(tmp_path)
    monitors = [attnwatch.watch(model, report=False) for _ in range(2)]
    for monitor in monitors:
        monitor.close()
    assert len({monitor.run for monitor in monitors}) == 2
    assert all(open_run(monitor.run).ended and monitor.run.parent == tmp_path / "runs" for monitor in monitors)


@pytest.mark.parametrize("given", ["run", None])
def test_a_trainer_may_change_its_directory(
    given: str | None, model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows, the report too, goes into the directory that was meant."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monitor = attnwatch.watch(model, run=given, every=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    forward(model)
    monitor.step(loss=1.0)
    monitor.close()
    assert monitor.problems == []
    assert (monitor.run / "report.html").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("hooked", [False, True])
def test_a_run_without_a_counted_step_says_so(
    hooked: bool, model: Decoder, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """monitor.step was forgotten, or the optimizer is another model's: in the monitor, the log, the run, the page."""
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with attnwatch.watch(model, run=run, optimizer=other if hooked else None) as monitor:
        for _ in range(2):
            forward(model)
            if hooked:
                monitor.step(loss=1.0)
    assert [(p.where, p.text[:24]) for p in monitor.problems] == [("step", "no step was counted: tra")]
    assert list(open_run(run).problems) == monitor.problems
    assert any("no step was counted: training ended" in record.getMessage() for record in caplog.records)
    assert "no step was counted: training ended" in (run / "report.html").read_text()


def test_a_run_that_goes_on_without_a_counted_step_says_so(model: Decoder, run: Path) -> None:
    """The steps that its state brings along are none of its own."""
    with attnwatch.watch(model, run=run / "first", report=False) as before:
        forward(model)
        before.step()
    with attnwatch.watch(model, run=run / "second", report=False) as monitor:
        monitor.load_state_dict(before.state_dict())
    assert (before.problems, [p.where for p in monitor.problems]) == ([], ["step"])


def test_a_copy_of_a_monitor_that_is_dropped_ends_nothing(model: Decoder, run: Path) -> None:
    """As when a trainer copies its own state."""
    with attnwatch.watch(model, run=run, every=1, report=False) as monitor:
        for copied in (copy.copy, copy.deepcopy):
            held = {"monitor": monitor}
            twin = copied(held)
            assert twin is not held
            del twin, held
            gc.collect()
            forward(model)
            monitor.step()
    assert (open_run(run).steps.tolist(), monitor.problems) == ([0, 1], [])


# --- disks ------------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writes are refused as on a full disk, with another errno."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_training_goes_on_with_a_full_disk_and_recording_when_there_is_room_again(model: Decoder, run: Path) -> None:
    """One problem, however often it fails, which reaches the run as soon as there is room; what was lost is counted."""
    with attnwatch.watch(model, run=run, every=1, report=False) as monitor:
        for step in range(6):
            forward(model)
            with full_disk(0 if 2 <= step < 5 else resource.RLIM_INFINITY):
                monitor.step(loss=float(step))
        assert monitor.last is not None
        assert monitor.last.step == 5
    stored = open_run(run)
    assert stored.steps.tolist() == [0, 1, 5]
    assert stored.scalar("loss")[0].tolist() == [0, 1, 5]
    assert [(p.step, p.where) for p in stored.problems] == [(2, "run directory"), (5, "run directory")]
    assert "sample of step 2 lost" in stored.problems[0].text
    assert stored.problems[1].text == "3 samples, 3 lines of scalars.jsonl could not be written: they are lost"
    assert list(stored.problems) == monitor.problems


def test_a_run_directory_that_is_deleted_is_named_at_the_next_step(model: Decoder, run: Path) -> None:
    """The system would go on taking in what is written to files that have no name any more."""
    with attnwatch.watch(model, run=run, every=1) as monitor:
        forward(model)
        monitor.step(loss=1.0)
        shutil.rmtree(run)
        assert monitor.problems == []
        forward(model)
        monitor.step(loss=1.0)
        ((where, text),) = ((problem.where, problem.text) for problem in monitor.problems)
    assert where == "run directory"
    assert text.endswith("sample of step 1 lost: the file was deleted while it was written")
    assert not run.exists()


def test_a_report_that_cannot_be_written_is_named(model: Decoder, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the run and in the log, though nothing follows it."""
    with attnwatch.watch(model, run=run, every=1) as monitor:
        forward(model)
        monitor.step()
        (run / "report.html").mkdir()
    assert [problem.where for problem in open_run(run).problems] == ["report"]
    assert any("report: " in record.getMessage() for record in caplog.records)


# --- processes --------------------------------------------------------------------------------------------------------

TRAINER = """
import os, sys, torch, attnwatch
from torch import nn
run = sys.argv[1]
model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
def train(monitor, steps):
    for step in range(steps):
        model(torch.ones(1, 3, 8)).sum().backward()
        monitor.step(loss=1.0)
"""


def trained(body: str, run: Path) -> subprocess.CompletedProcess[str]:
    script = TRAINER + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script, run], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "body",
    [
        "monitor = attnwatch.watch(model, run=run, every=2)\ntrain(monitor, 3)",
        "def main():\n    train(attnwatch.watch(model, run=run, every=2), 3)\nmain()",
        "monitor = attnwatch.watch(model, run=run, every=2)\ntrain(monitor, 3)\nsys.exit(3)",
    ],
    ids=["a variable", "a function", "exit"],
)
def test_a_process_that_ends_without_close_ends_its_run(body: str, run: Path) -> None:
    ended = trained(body, run)
    assert ended.stderr == ""
    stored = open_run(run)
    assert (stored.steps.tolist(), stored.ended, (run / "report.html").exists()) == ([0, 2], True, True)


@pytest.mark.parametrize("child", ["pass", "monitor.step(lost=1.0)", "optimizer.step()", "monitor.close()"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_forked_process_leaves_the_run_to_its_parent(child: str, hooked: bool, run: Path) -> None:
    """Whatever it does with its copy of the monitor; outputs are told by a thread that it does not have."""
    body = f"""
        class Quiet:
            write = close = lambda *_: None
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        counter = optimizer if {hooked} else None
        monitor = attnwatch.watch(model, run=run, every=1, outputs=[Quiet()], optimizer=counter)
        def step():
            train(monitor, 1)
            if {hooked}:
                optimizer.step()
        step()
        child = os.fork()
        if child == 0:
            {child}
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(attnwatch.open_run(run).ended)
        step()
    """
    assert trained(body, run).stdout == "False\n"
    stored = open_run(run)
    assert (stored.steps.tolist(), stored.ended, stored.problems) == ([0, 1], True, ())
    assert "lost" not in (run / "scalars.jsonl").read_text()


def test_kill_9_leaves_a_readable_run(run: Path) -> None:
    body = "monitor = attnwatch.watch(model, run=run, every=2)\ntrain(monitor, 4)\nos.kill(os.getpid(), 9)"
    assert trained(body, run).returncode == -signal.SIGKILL
    stored = open_run(run)
    assert (stored.steps.tolist(), stored.ended, stored.problems) == ([0, 2], False, ())
    assert stored.scalar("loss")[0].tolist() == [0, 1, 2, 3]
    assert [layer.name for layer in stored.coverage] == ["self_attn"]
