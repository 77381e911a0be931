"""Scans that do not go well: bad checkpoints among good ones, and a process that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.checkpoints import save, save_sharded, weights

from attnwatch.hooks.checkpoints import is_checkpoint
from attnwatch.monitor.cli import main
from attnwatch.monitor.run import open_run
from attnwatch.monitor.scan import scan
from attnwatch.monitor.steps import Step, find_steps


def series(folder: Path) -> Path:
    """Sound checkpoints of the steps 100, 200 and 300."""
    for step in (100, 200, 300):
        save("directory", folder / f"checkpoint-{step}", weights(seed=step))
    return folder


def test_a_bad_checkpoint_is_named_and_the_others_are_scanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off at step 100, a shard missing at 200, no attention at 250: exit code 2, a line for each, and of 300 and
    400 the numbers that a scan of these two has. The report lists the three; JSON does too."""
    folder = series(tmp_path / "steps")
    cut = folder / "checkpoint-100" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-600])
    (folder / "checkpoint-200" / "model.safetensors").unlink()
    save_sharded(folder / "checkpoint-200", weights())
    next((folder / "checkpoint-200").glob("model-*2.safetensors")).unlink()
    save("directory", folder / "checkpoint-250", {"fc.weight": torch.ones(4, 4)})
    state = weights(seed=1)
    state["model.layers.2.self_attn.q_proj.weight"][0, 0] = torch.nan
    save("directory", folder / "checkpoint-400", state)
    alone = scan([Step(n, folder / f"checkpoint-{n}", "name") for n in (300, 400)])
    out = tmp_path / "run"
    assert main(["scan", str(folder), "--out", str(out)]) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("attnwatch: left out: expected ")]
    for number, line in zip((100, 200, 250), lines, strict=True):
        assert f"checkpoint-{number}" in line
    assert "2 checkpoints, step 300 to 400" in said.out
    run = open_run(out)
    assert run.ended
    assert run.steps.tolist() == [x["step"] for x in run.header["checkpoints"]] == [300, 400]
    np.testing.assert_array_equal(run.metric("qk_rank"), [x.sample["qk_rank"] for x in alone.checkpoints])
    assert [(x.rule, x.place, x.fired_step) for x in run.alerts] == [
        ("weights_nonfinite", "model.layers.2.self_attn", 400)
    ]
    assert [(x.step, x.where) for x in run.problems] == [(n, f"checkpoint-{n}") for n in (100, 200, 250)]
    assert all(line.removeprefix("attnwatch: left out: ")[:60] in str(run.problems) for line in lines)
    assert "<code>checkpoint-250</code>" in (out / "report.html").read_text()
    assert main(["scan", str(folder), "--json"]) == 2
    assert [x["step"] for x in json.loads(capsys.readouterr().out)["problems"]] == [100, 200, 250]


def test_a_checkpoint_that_goes_while_others_are_scanned_is_left_out(tmp_path: Path) -> None:
    """As a trainer does that keeps the newest ones only."""
    steps = find_steps([series(tmp_path)], is_checkpoint)

    def remove(name: str, done: int, total: int) -> None:
        if done == 1:
            (tmp_path / "checkpoint-200" / "model.safetensors").unlink()

    found = scan(steps, progress=remove)
    assert [x.step.number for x in found.checkpoints] == [100, 300]
    assert [(x.step, x.where) for x in found.problems] == [(200, "checkpoint-200")]


def test_a_checkpoint_that_cannot_be_looked_at_is_left_out(tmp_path: Path) -> None:
    """As one without permission: here the names of what is in it are too long to be asked for."""
    save("directory", tmp_path / "checkpoint-100", weights())
    hidden = tmp_path / "checkpoint-200"
    while len(str(hidden)) < 4090:
        hidden /= "d" * min(4090 - len(str(hidden)) - 1, 200)
    hidden.mkdir(parents=True)
    found = scan(find_steps([tmp_path / "checkpoint-100", hidden], is_checkpoint))
    assert [x.step.path.name for x in found.checkpoints] == ["checkpoint-100"]
    (problem,) = found.problems
    assert problem.text.startswith(f"expected a checkpoint at {str(hidden)!r}, found")


def test_when_none_can_be_scanned_it_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, that of the first, and nothing recorded."""
    for name in ("step_1.pt", "step_2.pt"):
        (tmp_path / name).write_bytes(b"PK")
    assert main(["scan", str(tmp_path / "step_1.pt"), str(tmp_path / "step_2.pt"), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "step_1.pt" in said
    assert not (tmp_path / "run").exists()


KILLED = """
import os, signal, sys
from itertools import count
from pathlib import Path
from attnwatch.monitor.run import CHECKPOINTS
from attnwatch.monitor.scan_record import Record

def begun(out, left):
    # The exit code of a process that begins to record, and is killed before it touches more than `left` things.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def touched(event, arguments):
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(arguments[0]).startswith(out):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touched)
    Record(Path(out), {"source": CHECKPOINTS, "metrics": []}, 1).close((), ended=True)
    os._exit(0)

for left in count():
    codes = [begun(f"{sys.argv[1]}-{left}", most) for most in (left, left, 1000)]
    print(*codes, flush=True)
    if codes == [0, 0, 0]:
        break
"""


def test_a_scan_that_was_killed_at_its_beginning_goes_on(tmp_path: Path) -> None:
    """Killed before each of the things that it does in the directory, and once more where that had left it: the
    directory is always one that the next scan takes."""
    said = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")], capture_output=True, text=True, timeout=60
    )
    codes = [line.split() for line in said.stdout.splitlines()]
    assert len(codes) > 6, said.stderr
    assert codes[0] == ["-9", "-9", "0"]
    assert codes[-1] == ["0", "0", "0"]
    assert {third for _, _, third in codes} == {"0"}, said.stderr
    assert all(open_run(path).ended for path in tmp_path.iterdir())
