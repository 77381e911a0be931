"""`attnwatch attach` and `detach` on processes that train: what is recorded, and that nothing else changes."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.attaching import Shell, Trainee
from tests.trainees import begin

from attnwatch import Run, open_run

CLEAN = {"forward_hooks": 0, "optimizer_hooks": 0, "backward": True}


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("r"))


def attached_once(shell: Shell, trainee: Trainee, run: Path, *options: str) -> Run:
    """Attach at a random moment, some watched steps, detach, some steps alone, the end."""
    trainee.train(random.Random(8).randint(3, 9))
    said = shell.says("attach", trainee.pid, "--run", run, "--every", 2, *options)
    assert f"in {run}\n" in said
    trainee.train(12)
    assert f"{run}/report.html" in shell.says("detach", trainee.pid)
    trainee.train(3)
    trainee.end()
    return open_run(run)


def assert_as_alone(trainee: Trainee, folder: Path, kind: str) -> None:
    """The same training of as many steps to which nobody attaches has the same bits in its losses and weights."""
    folder.mkdir()
    with warnings.catch_warnings(action="ignore"):
        begin(kind, folder, len(trainee.losses))
    assert (folder / "losses").read_text() == (trainee.folder / "losses").read_text()
    assert json.loads((folder / "left.json").read_text())["weights"] == trainee.left["weights"]


@pytest.mark.parametrize("kind", ["plain", "worker", "compiled", "trainer"])
def test_a_training_is_watched_from_some_moment_to_another_and_has_the_same_bits(
    kind: str, shell: Shell, tmp_path: Path
) -> None:
    """Also a model that was compiled before, whose graphs see no hook that comes later; one that Hugging Face's
    Trainer feeds with accumulated micro-batches; one whose data come from another process."""
    with Trainee(shell, tmp_path / "watched", kind, "--arm") as trainee:
        run = attached_once(shell, trainee, tmp_path / "run")
        assert_as_alone(trainee, tmp_path / "alone", kind)
    assert run.ended
    assert [layer.state for layer in run.coverage] == ["verified", "verified"]
    assert run.problems == ()
    assert len(run.steps) >= 6
    assert np.isfinite(run.metric("entropy")).all()
    assert np.unique(np.diff(run.steps)).tolist() == [2]

    steps, losses = run.scalar("loss")
    assert np.unique(np.diff(steps)).tolist() == [1]
    printed = np.array(trainee.losses)[steps]
    np.testing.assert_allclose(losses, printed, rtol=1e-4 if kind == "trainer" else 0)

    left = trainee.left
    assert {name: left[name] for name in CLEAN} == CLEAN
    assert left["threads"] == 1  # armed, as before
    assert (run.path / "report.html").exists()
    assert not (tmp_path / "run-2").exists()


def test_a_process_that_was_not_armed_is_left_as_it_was_by_every_cycle(
    program: Callable[[str], str], shell: Shell, tmp_path: Path
) -> None:
    """Through gdb, at whatever a process does that allocates in two threads."""
    program("gdb")
    with Trainee(shell, tmp_path / "watched", "greedy") as trainee:
        trainee.train(2)
        for cycle in range(3):
            run = tmp_path / f"run-{cycle}"
            shell.says("attach", trainee.pid, "--run", run, "--every", 1, "--unsafe")
            trainee.train(4)
            shell.says("detach", trainee.pid)
            trainee.train(1)
            assert len(open_run(run).steps) >= 3
        said = trainee.end()
        assert_as_alone(trainee, tmp_path / "alone", "plain")
    assert said == ""
    assert {name: trainee.left[name] for name in CLEAN} == CLEAN
    assert trainee.left["threads"] == 0


def test_several_models_have_a_run_each_and_their_own_loss(shell: Shell, tmp_path: Path) -> None:
    """The loss of the judge, ten times the generator's, goes to the judge."""
    with Trainee(shell, tmp_path / "watched", "twins", "--arm") as trainee:
        trainee.train(2)
        found = shell.says("attach", trainee.pid, "--dry-run")
        assert found.splitlines()[1:] == [
            f"  {number}  Decoder: 11,698 parameters, attention, trained by SGD" for number in range(2)
        ]
        shell.says("attach", trainee.pid, "--run", tmp_path / "run", "--every", 1)
        trainee.train(5)
        shell.says("detach", trainee.pid)
        assert "expected --model to be one of 0 Decoder" in shell.refuses("attach", trainee.pid, "--model", 2)
        shell.says("attach", trainee.pid, "--run", tmp_path / "one", "--model", 1)
        trainee.train(2)
        shell.says("detach", trainee.pid)
        trainee.end()
    runs = [open_run(tmp_path / name) for name in ("run", "run-2")]  # the first is that of whoever stepped first
    generator, judge = sorted(runs, key=lambda run: float(run.scalar("loss")[1][0]))
    assert generator.scalar("loss")[1].max() < 10 < judge.scalar("loss")[1].min()
    assert {len(each.coverage) for each in (generator, judge)} == {2}
    assert not (tmp_path / "one-2").exists()


def test_who_attaches_twice_is_told_where_it_is_recorded_and_the_end_of_training_completes_the_run(
    shell: Shell, tmp_path: Path
) -> None:
    with Trainee(shell, tmp_path / "watched", "plain", "--arm") as trainee:
        trainee.train(1)
        shell.says("attach", trainee.pid, "--run", tmp_path / "run")
        assert f"found it watched in {tmp_path / 'run'}; detach first" in shell.refuses("attach", trainee.pid)
        trainee.train(2)
        trainee.end()
    assert open_run(tmp_path / "run").ended
    assert (tmp_path / "run" / "report.html").exists()


def test_what_cannot_be_watched_is_said_and_the_process_trains_on(shell: Shell, tmp_path: Path) -> None:
    with Trainee(shell, tmp_path / "watched", "without_attention", "--arm") as trainee:
        trainee.train(1)
        assert "nothing watched in it" in shell.refuses("detach", trainee.pid)
        line = shell.refuses("attach", trainee.pid)
        assert "expected a model with attention in training, found 0 Linear: 20 parameters, no attention" in line
        trainee.train(2)
        trainee.end()
    assert {name: trainee.left[name] for name in CLEAN} == CLEAN


def test_a_script_that_was_started_watched_and_holds_no_attention_can_be_let_go(shell: Shell, tmp_path: Path) -> None:
    before = ["-m", "attnwatch", "run", "-o", tmp_path / "run"]
    with Trainee(shell, tmp_path / "watched", "without_attention", "--arm", before=before) as trainee:
        trainee.train(2)
        assert "watched in no directory yet; detach first" in shell.refuses("attach", trainee.pid)
        said = shell.says("detach", trainee.pid)
        assert said.startswith("nothing was watched: expected a model with attention in training, found 0  Linear")
        assert "expected a model with attention" in shell.refuses("attach", trainee.pid)
        trainee.train(2)
        trainee.end()
    assert {name: trainee.left[name] for name in CLEAN} == CLEAN
    assert not (tmp_path / "run").exists()
