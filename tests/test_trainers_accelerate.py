"""`AttnwatchTracker` in a loop with the real Accelerate, in one process and in two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tests import tiny
from tests.gang import gang
from torch.utils.data import DataLoader

from attnwatch import Rule, UsageError, open_run
from attnwatch.monitor.trainers.accelerate import AttnwatchTracker

HIGH = Rule("high", "critical", "scalar.mark > 3")
"""Fires at the first step whose `mark` is above."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Ends what each loop began. Accelerate keeps one state for all accelerators of a process."""
    yield
    while Loop.begun:
        Loop.begun.pop().accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Loop:
    """Six steps, written as Accelerate's documentation has it."""

    begun: ClassVar[list[Loop]] = []

    def __init__(self, tracker: AttnwatchTracker | None, batch: int = 4, accumulated: int = 1, scaler: bool = False):
        self.begun.append(self)
        self.tracker = tracker
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, log_with=tracker)
        if scaler:
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        inner = tiny.llama()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.06)
        loader: Any = DataLoader(tiny.texts(24), batch_size=batch)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader = self.accelerator.prepare(inner, optimizer, loader)
        self.accelerator.init_trackers("tiny")
        self.losses: list[float] = []
        self.done = 0
        if tracker is not None:
            tracker.watch(self.accelerator, self.model, self.optimizer)

    def run(self, after: Callable[[int], object] = lambda step: None, first: int = 0) -> None:
        """after: called with the number of each step that is done, from 1; a true answer ends the loop."""
        self.done = first
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.losses.append(float(loss.detach()))
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.done += 1
                self.accelerator.log({"loss": loss, "mark": self.done, "note": "no number"}, step=100 + self.done)
                if after(self.done):
                    break
        self.accelerator.end_training()


def test_an_accumulated_step_is_the_step_of_its_whole_batch(tmp_path: Path) -> None:
    Loop(AttnwatchTracker(run=tmp_path / "whole", **tiny.ALL_ROWS)).run()
    parts = Loop(AttnwatchTracker(run=tmp_path / "parts", **tiny.ALL_ROWS), batch=1, accumulated=4)
    parts.run()
    found, expected = open_run(tmp_path / "parts"), open_run(tmp_path / "whole")
    assert found.ended
    assert found.problems == ()
    assert found.steps.tolist() == [0, 1, 2, 3, 4, 5]
    for name in ("entropy", "logit_max", "logit_spread", "sink_mass", "qk_rank", "map_rank"):
        np.testing.assert_allclose(found.metric(name), expected.metric(name), rtol=1e-3, err_msg=name)
    steps, losses = found.scalar("loss")
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(losses, parts.losses[3::4])  # what the loop logged: the last batch's
    assert found.scalar("mark")[1].tolist() == [1, 2, 3, 4, 5, 6]


def test_training_is_bit_for_bit_what_it_was(tmp_path: Path) -> None:
    watched, plain = Loop(AttnwatchTracker(run=tmp_path / "run", every=2, report=False)), Loop(None)
    watched.run()
    plain.run()
    assert tiny.same(tiny.weights(watched.model), tiny.weights(plain.model))
    assert watched.losses == plain.losses
    assert tiny.hooks(watched.model) == 0


def test_evaluation_in_between_leaves_no_trace(tmp_path: Path) -> None:
    Loop(AttnwatchTracker(run=tmp_path / "alone", **tiny.ALL_ROWS)).run()
    between = Loop(AttnwatchTracker(run=tmp_path / "between", **tiny.ALL_ROWS))

    def evaluate(_: int) -> None:
        between.model.eval()
        with torch.no_grad():
            between.model(**torch.utils.data.default_collate(tiny.texts(8, seed=5)))
        between.model.train()

    between.run(evaluate)
    tiny.assert_samples(open_run(tmp_path / "between"), open_run(tmp_path / "alone"))
    assert open_run(tmp_path / "between").problems == ()


def test_a_step_that_the_scaler_skips_is_none(tmp_path: Path) -> None:
    """The optimizer counts: the sample takes in the batches until it steps, and logged numbers of a skipped step are
    nobody's. fp16 itself needs an accelerator; here its scaler stands in Accelerate without it."""
    loop = Loop(AttnwatchTracker(run=tmp_path / "run", spectrum_every=1, **tiny.ALL_ROWS), scaler=True)
    tiny.overflow(loop.model, at=0)
    skipped: list[bool] = []
    loop.run(lambda _: skipped.append(loop.accelerator.optimizer_step_was_skipped))
    assert skipped == [True] + [False] * 5
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 3, 4]
    assert run.problems == ()
    assert run.alerts == ()
    assert run.scalar("mark")[0].tolist() == [0, 1, 2, 3, 4]
    assert run.scalar("mark")[1].tolist() == [2, 3, 4, 5, 6]
    assert (run.metric("nonfinite") == 0).all()


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    """Steps are counted on, no alert is repeated or forgotten."""
    rules = [Rule("first", "critical", "scalar.mark > 1"), HIGH]
    options = {"run": tmp_path / "run", "rules": rules, "every": 2, "report": False}
    loop = Loop(AttnwatchTracker(**options))

    def save(step: int) -> None:
        if step == 3:
            loop.accelerator.save_state(str(tmp_path / "kept"))

    loop.run(save)
    again = Loop(AttnwatchTracker(**options))
    again.accelerator.load_state(str(tmp_path / "kept"))
    again.run(lambda step: step == 6, first=3)
    first, second = open_run(tmp_path / "run"), open_run(tmp_path / "run-2")
    assert first.steps.tolist() == [0, 2, 4]
    assert second.steps.tolist() == [4]
    assert second.scalar("mark")[0].tolist() == [3, 4, 5]
    assert [(alert.rule, alert.fired_step) for alert in first.alerts] == [("first", 1), ("high", 3)]
    assert [(alert.rule, alert.fired_step) for alert in second.alerts] == [("first", 1), ("high", 3)]


def test_a_loop_that_goes_back_to_a_checkpoint_begins_a_run(tmp_path: Path) -> None:
    """After the alert it loads what it saved before, and goes on from there."""
    tracker = AttnwatchTracker(run=tmp_path / "run", rules=[HIGH], every=2, report=False)
    loop = Loop(tracker)
    went_back: list[int] = []

    def go_back(step: int) -> None:
        if step == 2:
            loop.accelerator.save_state(str(tmp_path / "kept"))
        if tracker.fired() and not went_back:
            went_back.append(step)
            loop.accelerator.load_state(str(tmp_path / "kept"))

    loop.run(go_back)
    assert went_back == [4]
    first, second = open_run(tmp_path / "run"), open_run(tmp_path / "run-2")
    assert first.ended
    assert [alert.fired_step for alert in first.alerts] == [3]
    assert second.scalar("mark")[0].tolist() == [2, 3]
    assert [alert.fired_step for alert in second.alerts] == [2]  # `mark` goes on from 5: another alert


def train_two_models(folder: Path, load: bool) -> list[AttnwatchTracker]:
    """Four batches: the first model steps at each, the second at every other one."""
    trackers = [AttnwatchTracker(run=folder / name, every=2, report=False) for name in ("often", "rarely")]
    accelerator = Accelerator(cpu=True, log_with=trackers)
    models = [accelerator.prepare(tiny.llama()) for _ in trackers]
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.06)) for model in models]
    accelerator.init_trackers("two")
    for tracker, model, optimizer in zip(trackers, models, optimizers, strict=True):
        tracker.watch(accelerator, model, optimizer)
    if load:
        accelerator.load_state(str(folder / "kept"))
    for number, batch in enumerate(DataLoader(tiny.texts(16), batch_size=4)):  # type: ignore[arg-type]
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 2 - number % 2]:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss})
    accelerator.save_state(str(folder / "kept"))
    accelerator.end_training()
    return trackers


def test_several_models_have_a_tracker_each(tmp_path: Path) -> None:
    """Each counts the steps of its own optimizer, also after a resume."""
    for load in (False, True):
        assert [tracker.tracker is not None for tracker in train_two_models(tmp_path, load)] == [True, True]
    steps = {path.name: open_run(path).steps.tolist() for path in tmp_path.iterdir() if path.name != "kept"}
    assert steps == {"often": [0, 2], "rarely": [0], "often-2": [4, 6], "rarely-2": [2]}
    assert all(open_run(tmp_path / name).problems == () for name in steps)


def test_a_state_of_other_rules_is_named_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = Loop(AttnwatchTracker(run=tmp_path / "run", rules=[HIGH], report=False))
    saving.accelerator.save_state(str(tmp_path / "kept"))
    loading = Loop(AttnwatchTracker(run=tmp_path / "run", report=False))
    loading.accelerator.load_state(str(tmp_path / "kept"))
    loading.run()
    assert "the checkpoint's state does not fit, and watching begins anew: expected" in caplog.text
    assert open_run(tmp_path / "run-2").steps.tolist() == [0]


def test_an_exception_loses_nothing(tmp_path: Path) -> None:
    """Whoever ends the training ends the run; else the process does."""
    loop = Loop(AttnwatchTracker(run=tmp_path / "run", every=1, report=False))

    def breaks(step: int) -> None:
        if step == 2:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        loop.run(breaks)
    assert open_run(tmp_path / "run").scalar("loss")[0].tolist() == [0, 1]
    loop.accelerator.end_training()
    assert open_run(tmp_path / "run").ended
    assert open_run(tmp_path / "run").steps.tolist() == [0, 1]


def test_a_critical_alert_is_told_once(tmp_path: Path) -> None:
    """At the step at which it fires: the loop saves, stops, or goes on."""
    tracker = AttnwatchTracker(run=tmp_path / "run", rules=[HIGH], report=False)
    said: list[bool] = []
    Loop(tracker).run(lambda _: said.append(tracker.fired()))
    assert said == [False, False, False, True, False, False]


def test_the_accelerator_knows_it(tmp_path: Path) -> None:
    """By its name, as any tracker; before `watch` it is silent."""
    tracker = AttnwatchTracker(run=tmp_path / "run", every=5, report=False)
    tracker.log({"loss": 1.0})
    assert tracker.tracker is None
    assert tracker.state_dict() == {}
    loop = Loop(tracker)
    assert loop.accelerator.get_tracker("attnwatch") is tracker
    monitor = loop.accelerator.get_tracker("attnwatch", unwrap=True)
    assert monitor is tracker.tracker
    loop.accelerator.end_training()


def test_every_kind_of_number_is_taken(tmp_path: Path) -> None:
    """numpy's small ones too, which are no floats of Python's."""
    tracker = AttnwatchTracker(run=tmp_path / "run", every=5, report=False)
    loop = Loop(tracker)
    numbers = {"f16": np.float16(0.5), "f32": np.float32(1.5), "i64": np.int64(2), "t": torch.tensor(3.5), "b": True}
    loop.run(lambda _: loop.accelerator.log(numbers))
    run = open_run(tmp_path / "run")
    assert {name: run.scalar(name)[1].tolist() for name in numbers} == {
        "f16": [0.5] * 6, "f32": [1.5] * 6, "i64": [2] * 6, "t": [3.5] * 6, "b": [1] * 6,
    }  # fmt: skip


def test_wrong_options_are_one_line() -> None:
    with pytest.raises(UsageError, match="found optimizer; leave it out: the trainer's own steps are counted"):
        AttnwatchTracker(optimizer=None)


def test_two_processes_stop_at_the_same_step(tmp_path: Path) -> None:
    """Rank 0 watches; both learn of the alert at the next of every third question. In Accelerate's loop,
    the Trainer and Lightning: one that left alone would hang the other."""
    gang("two_ranks.py", 2, str(tmp_path))
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1] == {"loop": 7, "trainer": 4, "fit": 4}
    assert sorted(path.name for path in tmp_path.glob("*-run*")) == ["fit-run", "loop-run", "trainer-run"]
    assert open_run(tmp_path / "loop-run").steps.tolist() == [0, 3, 6]
    assert [alert.fired_step for alert in open_run(tmp_path / "loop-run").alerts] == [4]
    for name in ("trainer", "fit"):
        run = open_run(tmp_path / f"{name}-run")
        assert [alert.fired_step for alert in run.alerts] == [2]
        assert run.problems == ()
        # Of rank 0's batch alone, in nats a token: an untrained model knows nothing of 32 tokens.
        assert run.scalar("loss")[1][0] == pytest.approx(np.log(32), abs=0.3)
