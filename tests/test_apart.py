"""An output in a thread of its own: told everything in order, and nobody waits for it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from tests.made_updates import EMPTY, alert, sample
from tests.monitoring import wait_for
from torch import nn

import attnwatch
from attnwatch import Rule, TrainingStopped, open_run
from attnwatch.monitor.journal import Journal
from attnwatch.monitor.outputs import apart as module
from attnwatch.monitor.outputs.apart import Apart, Late, apart
from attnwatch.monitor.outputs.log import LogOutput
from attnwatch.monitor.outputs.prometheus import Prometheus
from attnwatch.monitor.sample import Update
from attnwatch.monitor.store import RunWriter

NAME: ContextVar[str] = ContextVar("NAME", default="nobody's")


class Gated:
    """An output that remembers, and that takes in nothing while its gate is shut."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.contexts: list[str] = []
        self.threads: set[str] = set()
        self.closed = 0
        self.gate, self.entered = Event(), Event()

    def write(self, update: Update) -> str | None:
        self.entered.set()
        assert self.gate.wait(60)
        self.updates.append(update)
        self.contexts.append(NAME.get())
        self.threads.add(current_thread().name)
        return None

    def close(self) -> None:
        self.closed += 1


def steps(updates: list[Update]) -> list[int]:
    return [update.step for update in updates]


def test_all_is_told_in_order_from_one_other_thread_and_then_it_is_closed() -> None:
    output = Gated()
    told = Apart(output, 200, 60)
    for step in range(100):
        told.write(replace(EMPTY, step=step))
    assert output.updates == []
    output.gate.set()
    told.close()
    assert (steps(output.updates), output.closed, output.threads) == (list(range(100)), 1, {"attnwatch-Gated"})
    told.close()
    assert output.closed == 1


def test_what_happens_at_no_step_is_told_within_a_moment() -> None:
    """Without a sample or an alert nobody wakes the thread."""
    output = Gated()
    output.gate.set()
    told = Apart(output, 200, 60)
    told.write(replace(EMPTY, step=7))
    wait_for(lambda: steps(output.updates) == [7], "the update")
    told.close()


def test_where_it_is_full_alerts_are_kept_and_samples_left_out_counted_and_said() -> None:
    """Two updates have room. Of 10 the first is being told; the second waits; the others become the newest."""
    output = Gated()
    told = Apart(output, 2, 60)
    first = sample(0, np.zeros((3, 2, 2)))
    told.write(replace(EMPTY, sample=first, is_new=True))
    assert output.entered.wait(60)
    said = []
    for step in range(1, 10):
        fired = (alert(f"rule{step}", "critical", "firing"),) if step in (4, 7) else ()
        newest = first if step < 5 else sample(5, np.full((3, 2, 2), 5.0))
        said.append(told.write(replace(EMPTY, step=step, sample=newest, is_new=step == 5, changed=fired)))
    output.gate.set()
    with pytest.raises(Late, match=r"^7 updates were left out$"):
        told.close()
    assert said.pop(2) == "slower than training: 2 updates were waiting, further ones are left out"
    assert said == [None] * 8
    assert steps(output.updates) == [0, 1, 9]
    last = output.updates[-1]
    assert ([a.rule for a in last.changed], last.is_new, last.sample) == (["rule4", "rule7"], True, newest)


def test_the_context_of_the_trainer_is_there() -> None:
    """As it is when the trainer tells: some trackers keep their run there."""
    output = Gated()
    output.gate.set()
    told = Apart(output, 200, 60)
    told.write(EMPTY)
    mark = NAME.set("the trainer's")
    told.write(EMPTY)
    NAME.reset(mark)
    told.close()
    assert output.contexts == ["nobody's", "the trainer's"]


def test_a_problem_that_it_goes_on_after_is_handed_on_once() -> None:
    class Complains(Gated):
        def write(self, update: Update) -> str:
            super().write(update)
            return "half of it"

    output = Complains()
    output.gate.set()
    told = Apart(output, 200, 60)
    told.write(replace(EMPTY, is_new=True))
    wait_for(lambda: output.updates, "the update")
    told.end()
    with pytest.raises(Late, match=r"^half of it$"):
        told.close()


def test_one_that_raises_is_closed_and_named_under_its_own_name(tmp_path: Path) -> None:
    class Broken(Gated):
        def write(self, update: Update) -> None:
            raise ConnectionError("no route")

    output, quiet = Broken(), Gated()
    quiet.gate.set()
    journal = Journal(
        RunWriter(tmp_path / "run", {"metrics": []}), [LogOutput(), Apart(output, 9, 60), Apart(quiet, 9, 60)]
    )
    journal.tell(replace(EMPTY, is_new=True))
    wait_for(lambda: output.closed, "its end")
    wait_for(lambda: journal.tell(EMPTY) or journal.problems, "the problem")
    journal.dismiss()
    assert [(problem.where, problem.text) for problem in journal.problems] == [("Broken", "ConnectionError: no route")]
    assert (output.closed, quiet.closed, len(journal.outputs)) == (1, 1, 1)
    journal.close()


@pytest.mark.parametrize("ends", ["write", "close"])
@pytest.mark.parametrize("raised", [OSError("no"), SystemExit("no"), KeyboardInterrupt("no")], ids=repr)
def test_whatever_it_raises_ends_the_output_and_not_the_trainer(
    ends: str, raised: BaseException, tmp_path: Path
) -> None:
    """Also what ends a thread in silence: some libraries exit when they have no configuration."""

    class Leaves:
        closed = 0

        def write(self, update: Update) -> None:
            if ends == "write":
                raise raised

        def close(self) -> None:
            self.closed += 1
            if ends == "close":
                raise raised

    output = Leaves()
    journal = Journal(RunWriter(tmp_path / "run", {"metrics": []}), [LogOutput(), Apart(output, 9, 60)])
    journal.tell(replace(EMPTY, is_new=True))
    journal.dismiss()
    journal.close()
    name = type(raised).__name__
    text = f"{name}: no" if isinstance(raised, Exception) else f"RuntimeError: {name}: no"
    assert [(problem.where, problem.text) for problem in journal.problems] == [("Leaves", text)]
    assert output.closed == 1


def test_all_are_asked_to_end_before_any_is_waited_for(tmp_path: Path) -> None:
    """The newest, which is closed first, waits here for the end of the oldest."""
    ended = Event()

    class Ends(Gated):
        def close(self) -> None:
            ended.set()

    class Waits(Gated):
        def close(self) -> None:
            assert ended.wait(60)

    outputs = [LogOutput(), Apart(Ends(), 9, 20), Apart(Waits(), 9, 20)]
    journal = Journal(RunWriter(tmp_path / "run", {"metrics": []}), outputs)
    journal.dismiss()
    journal.close()
    assert journal.problems == []


def test_a_quick_output_is_told_at_once() -> None:
    class Quick(Gated):
        quick = True

    output = Quick()
    assert apart(output) is output
    assert isinstance(apart(Gated()), Apart)


def test_an_output_that_hangs_delays_neither_steps_nor_alerts_nor_scrapes_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes in one update and never comes back, in training and at the end; another one goes on."""
    monkeypatch.setattr(module, "PATIENCE", 2.0)
    hangs, other = Gated(), Gated()
    other.gate.set()
    rules = [Rule("high", "critical", "loss > 5", summary="too high")]
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    monitor = attnwatch.watch(
        model, run=tmp_path / "run", every=1, rules=rules, outputs=[hangs, other], stop_on="critical",
        prometheus=Prometheus(port=0, linger=0),
    )  # fmt: skip
    for step in range(3):
        model(torch.ones(1, 3, 8)).sum().backward()
        monitor.step(loss=1.0 + step)
    page = urlopen(f"http://127.0.0.1:{monitor.metrics_port}/metrics", timeout=60).read().decode()
    assert "\nattnwatch_step 2.0\n" in page
    assert "\nattnwatch_loss 3.0\n" in page
    model(torch.ones(1, 3, 8)).sum().backward()
    with pytest.raises(TrainingStopped):
        monitor.step(loss=6.0)
    assert any("high at model firing at step 3" in record.getMessage() for record in caplog.records)
    wait_for(lambda: other.updates and other.updates[-1].changed, "the other one to hear of it")
    monitor.close()
    stored = open_run(tmp_path / "run")
    assert stored.ended
    late = "Late: still busy 2 s after the end, left alone"
    assert [(problem.where, problem.text) for problem in stored.problems] == [("Gated", late)]
    assert (hangs.updates, other.closed) == ([], 1)
    assert [a.rule for update in other.updates for a in update.changed] == ["high"]
    hangs.gate.set()
