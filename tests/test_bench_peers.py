"""What the comparison with other monitors rests on: steps in turn, the first left out, losses held side by side."""

from __future__ import annotations

import time

import pytest
import torch
from benchmarks.peers import timing
from benchmarks.peers.timing import Cost, apart, measure
from benchmarks.peers.watchers import OTHERS, SAME_WORK, Ours, Watcher
from torch import Tensor


class Clock:
    """CPU seconds as watchers say that they pass. told: whose step it was."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[str] = []

    def pass_by(self, who: str, seconds: float) -> None:
        self.now += seconds
        self.told.append(who)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A step of the unwatched model takes one second, the first one 50."""
    clock = Clock()
    monkeypatch.setattr(time, "process_time", lambda: clock.now)
    monkeypatch.setattr(Watcher, "before", lambda self, number: clock.pass_by("alone", 50 if number == 0 else 1))
    return clock


def slower(clock: Clock) -> type[Watcher]:
    class Slower(Watcher):
        """Takes 1.5 seconds in even steps, 2.5 in odd ones, 900 in the first."""

        def before(self, number: int) -> None:
            clock.pass_by("watched", 900 if number == 0 else 1.5 + number % 2)

    return Slower


def test_pairs_are_interleaved_and_the_first_is_left_out(clock: Clock) -> None:
    """Four counted pairs: 2.5 + 1.5 + 2.5 + 1.5 seconds against 4."""
    assert measure(slower(clock), length=4, steps=4, batch=1) == Cost(2.0, None)
    assert clock.told == [
        "watched", "alone", "alone", "watched", "watched", "alone", "alone", "watched", "watched", "alone",
    ]  # fmt: skip


class Draws(Watcher):
    """Takes a random number in its third step (2): the batch of the fourth is another."""

    def after_step(self, number: int, loss: Tensor) -> None:
        if number == 2:
            torch.rand(())


class Skips(Watcher):
    """Keeps the optimizer from its second step (1): the third has the weights of the second."""

    def after_backward(self, number: int, loss: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0 if number == 1 else 1e-3


@pytest.mark.parametrize(("kind", "parted"), [(Watcher, None), (Draws, 3), (Skips, 2), (Ours, None)])
def test_the_step_is_named_in_which_losses_part(kind: type[Watcher], parted: int | None) -> None:
    """attnwatch itself draws nothing and changes nothing."""
    assert measure(kind, length=8, steps=4, batch=2).parted == parted


def test_one_that_cannot_run_says_why_and_one_that_can_is_measured() -> None:
    """In processes of their own, as the table has them."""
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'thermoclaw'"):
        apart("thermoclaw", 8, 1, "nowhere")
    found = apart("whole maps by hand", 8, 2, "nowhere")
    assert found.ratio > 0
    assert found.parted is None


def test_one_that_cannot_be_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OTHERS["trainpulse"], "packages", ("./no-such-package",))
    with pytest.raises(RuntimeError, match="not installed"):
        timing.costs("trainpulse", {8: 1})


def test_every_monitor_says_what_it_measures_and_which_version_it_is() -> None:
    watchers = SAME_WORK | OTHERS
    assert [name for name, kind in watchers.items() if not kind.what] == []
    packages = [package for kind in watchers.values() for package in kind.packages]
    assert [package for package in packages if "==" not in package] == []
