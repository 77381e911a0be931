"""Attaching beside threads that train: nothing changes under them, and each keeps its own loss."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.optim import SGD

from attnwatch.monitor.attach.crossing import Crossing, _turn
from attnwatch.monitor.attach.crossing import _between_hooks as between_hooks
from attnwatch.monitor.attach.losses import Losses

OPTIMIZER = import_module("torch.optim.optimizer")


@pytest.fixture
def interval(request: pytest.FixtureRequest) -> Iterator[float]:
    """s after which a thread hands the interpreter's lock to another."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def waits_a_little(*_: object) -> None:
    time.sleep(1e-4)


def makes_way(*_: object) -> None:
    time.sleep(0)


@pytest.mark.parametrize(("interval", "hook"), [(0.005, waits_a_little), (1e-6, makes_way)], indirect=["interval"])
def test_hooks_come_and_go_while_another_thread_makes_steps(interval: float, hook: object) -> None:
    """torch walks over its dictionary of hooks in every step, and would raise if it changed meanwhile: the hooks here
    are where threads switch, at Python's own pace and as often as they can. The switch interval is as before."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = SGD([parameter], lr=0.1)
    before = len(OPTIMIZER._global_optimizer_post_hooks)
    users = [OPTIMIZER.register_optimizer_step_post_hook(hook) for _ in range(3)]
    failures: list[Exception] = []
    stop = threading.Event()

    def train() -> None:
        try:
            while not stop.is_set():
                optimizer.step()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for turn in range(30):
            time.sleep(turn % 5 * 3e-4)  # so that it comes at all points of a step
            crossing = Crossing()
            crossing.open()
            assert turn % 5 or crossing.ask(lambda each: each is optimizer, lambda: bool(failures))
            crossing.close()
    finally:
        stop.set()
        thread.join()
        for user in users:
            user.remove()
    assert failures == []
    assert len(OPTIMIZER._global_optimizer_post_hooks) == before
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("interval", [1e-6, 15.5e-6], indirect=True)  # Python forgets the half
def test_no_other_thread_runs_while_hooks_are_changed(interval: float) -> None:
    """Nor is garbage collected: finalizers may let others run. Collection goes on behind it."""
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1

    def change() -> tuple[int, int, bool]:
        before, end = turns[0], time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        return before, turns[0], gc.isenabled()

    thread = threading.Thread(target=count)
    thread.start()
    before, after, collects = between_hooks(change)
    stop.set()
    thread.join()
    assert 0 < before == after
    assert (collects, gc.isenabled(), sys.getswitchinterval()) == (False, True, interval)


@pytest.fixture
def beside() -> Iterator[None]:
    """A thread in which there is a change all the time."""
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            between_hooks(bool)

    thread = threading.Thread(target=change)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_copy_made_while_hooks_are_changed_is_as_the_process_is(beside: None) -> None:
    """As the workers of a DataLoader: the thread that would put things right is not in the copy, which may have its
    hooks changed too."""
    interval = 0.005
    for _ in range(10):
        copy = os.fork()
        if not copy:
            usual = abs(sys.getswitchinterval() - interval) < 1e-6 and gc.isenabled()
            os._exit(0 if usual and between_hooks(lambda: True) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0


def test_changes_that_come_together_leave_the_interval_as_it_was(beside: None) -> None:
    interval = 0.005
    for _ in range(10):
        between_hooks(bool)
    with _turn:
        assert abs(sys.getswitchinterval() - interval) < 1e-6


@pytest.mark.parametrize("interval", [0.005], indirect=True)
def test_an_interval_that_another_thread_sets_meanwhile_stays(interval: float) -> None:
    def choose() -> None:
        while sys.getswitchinterval() < 0.09:
            pass
        sys.setswitchinterval(0.002)

    thread = threading.Thread(target=choose)
    thread.start()
    end = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < end
        between_hooks(bool)
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_a_step_in_another_thread_has_the_loss_of_the_only_one_that_has_any() -> None:
    """On a GPU, optimizers that step within the backward do so in a thread of the device."""
    losses = Losses()
    losses.install()
    torch.tensor(3.0, requires_grad=True).backward()
    seen: list[torch.Tensor | None] = []
    thread = threading.Thread(target=lambda: seen.append(losses.take()))
    thread.start()
    thread.join()
    losses.remove()
    assert seen == [torch.tensor(3.0)]


def test_a_thread_for_every_backward_that_ends_with_it() -> None:
    """Python may give each another number: threads that stay, here, have those of the ones before."""
    losses = Losses()
    losses.install()
    weight, stay = torch.tensor(1.0, requires_grad=True), threading.Event()
    others, seen = [], []
    for step in (1, 2, 3, 4):
        others.append(threading.Thread(target=stay.wait))
        others[-1].start()
        thread = threading.Thread(target=lambda by: (weight * by).backward(), args=(step,))
        thread.start()
        thread.join()
        seen.append(losses.take())
    stay.set()
    for thread in others:
        thread.join()
    losses.remove()
    assert seen == [1.0, 2.0, 3.0, 4.0]


def test_threads_that_train_a_model_each_have_the_losses_of_their_own() -> None:
    """1, 2, 3, ... in one and 100, 200, 300, ... in the other, which are both between backward and step at a time."""
    losses = Losses()
    losses.install()
    together = threading.Barrier(2, timeout=60)
    seen: dict[float, list[float]] = {}

    def train(unit: float) -> None:
        weight = torch.tensor(unit, requires_grad=True)
        for step in (1, 2, 3):
            together.wait()
            (weight * step).backward()
            together.wait()
            loss = losses.take()
            assert loss is not None
            seen.setdefault(unit, []).append(loss.item())

    threads = [threading.Thread(target=train, args=(unit,)) for unit in (1.0, 100.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses.remove()
    assert seen == {1.0: [1.0, 2.0, 3.0], 100.0: [100.0, 200.0, 300.0]}
