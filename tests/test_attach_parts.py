"""What attaching is made of: what of the loss is seen, when a process may be touched, which steps count."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes import Attention, Decoder, fused
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import attnwatch
from attnwatch.monitor.attach.crossing import Crossing
from attnwatch.monitor.attach.finding import find
from attnwatch.monitor.attach.losses import Losses
from attnwatch.monitor.attach.serving import watching
from attnwatch.monitor.attach.wanted import Wanted
from attnwatch.monitor.attach.watcher import Watcher, steps_done

HOOKS = import_module("torch.optim.optimizer")._global_optimizer_post_hooks
WATCHER = import_module("attnwatch.monitor.attach.watcher")


def decoder() -> Decoder:
    return Decoder(partial(Attention, fused))


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def losses() -> Iterator[Losses]:
    before = torch.autograd.backward
    noting = Losses()
    noting.install()
    yield noting
    noting.remove()
    assert torch.autograd.backward is before


def test_the_loss_of_a_step_is_the_sum_of_what_backward_was_called_on(losses: Losses) -> None:
    """0.5 + 0.25 of two micro-batches; not what came with a gradient, nor what is no single number."""
    x = torch.ones(2, requires_grad=True)
    (x.sum() * 0.25).backward()
    (x * 2).backward(torch.ones(2))
    x.sum().backward(torch.tensor(7.0))
    torch.autograd.backward([x.sum(), x.prod()])
    torch.autograd.backward(x[:1] * 0.25)
    total = losses.take()
    assert total is not None
    assert (total.item(), total.shape, total.requires_grad) == (0.75, (), False)
    assert x.grad is not None
    assert x.grad.tolist() == [0.25 + 2 + 7 + 2 + 0.25, 0.25 + 2 + 7 + 2]


def test_optimizers_that_step_one_after_the_other_have_the_same_loss(losses: Losses) -> None:
    """Until the next backward: then a new sum begins."""
    x = torch.ones((), requires_grad=True)
    assert losses.take() is None
    (x * 3).backward()
    assert [losses.take(), losses.take()] == [torch.tensor(3.0)] * 2
    (x * 4).backward()
    (x * 5).backward(retain_graph=True)
    assert losses.take() == torch.tensor(9.0)


def test_a_loss_that_cannot_be_read_raises_nothing_and_leaves_no_part_of_a_sum(losses: Losses) -> None:
    x, elsewhere = torch.ones((), requires_grad=True), torch.ones((), device="meta", requires_grad=True)
    (x * 3).backward()
    (elsewhere * 2).backward()
    assert losses.take() is None
    (x * 3).backward()
    assert losses.take() == torch.tensor(3.0)


def test_a_trainer_may_overwrite_its_loss(losses: Losses) -> None:
    x = torch.ones((), requires_grad=True)
    loss = x * 3
    loss.backward()
    loss.detach().fill_(100.0)
    assert losses.take() == torch.tensor(3.0)


def test_what_was_put_around_backward_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours then hands on what it is given."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    noting = Losses()
    noting.install()
    ours = torch.autograd.backward

    def around(*arguments: object, **named: object) -> None:
        ours(*arguments, **named)  # type: ignore[arg-type]

    torch.autograd.backward = around
    noting.remove()
    assert torch.autograd.backward is around
    x = torch.ones((), requires_grad=True)
    x.backward()
    assert (noting.take(), x.grad) == (None, torch.tensor(1.0))


# --- when -------------------------------------------------------------------------------------------------------------


def test_a_hook_comes_and_goes_while_a_closure_trains_inside_a_step() -> None:
    """As in Lightning, where nearly all of training is the closure of an optimizer's step."""
    before = len(HOOKS)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=0.1)
    inside, go_on = threading.Event(), threading.Event()

    def closure() -> float:
        inside.set()
        assert go_on.wait(60)
        return 0.0

    thread = threading.Thread(target=lambda: optimizer.step(closure))
    thread.start()
    crossing = Crossing()
    try:
        assert inside.wait(60)
        crossing.open()
        crossing.close()
        crossing.open()
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()
        crossing.close()
    assert len(HOOKS) == before


class Derived(SGD):
    """Calls the step of its base class, which has the hooks as well once there is an optimizer of that class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def crossed() -> Iterator[tuple[Crossing, list[Optimizer]]]:
    """A crossing, and the optimizers that have come to it."""
    crossing, seen = Crossing(), []
    crossing.after = seen.append
    crossing.open()
    yield crossing, seen
    crossing.close()


def test_a_step_that_calls_the_step_of_its_base_class_is_one(crossed: tuple[Crossing, list[Optimizer]]) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    plain, derived = SGD([parameter], lr=0.1), Derived([parameter], lr=0.1)
    derived.step()
    plain.step()
    assert crossed[1] == [derived, plain]


def test_what_is_asked_for_comes_after_the_step_was_counted_and_not_for_who_has_left(
    crossed: tuple[Crossing, list[Optimizer]],
) -> None:
    crossing, seen = crossed
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    asking = threading.Thread(target=lambda: done.append(crossing.ask(lambda _: len(seen), lambda: False)))
    done: list[int] = []
    asking.start()
    while asking.is_alive():
        optimizer.step()
    assert 1 <= done[0] <= len(seen)

    work: list[Optimizer] = []
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            optimizer.step()

    training = threading.Thread(target=train)
    training.start()
    try:
        with pytest.raises(TimeoutError):
            crossing.ask(work.append, lambda: True)
    finally:
        stop.set()
        training.join()
    assert work == []


def test_work_that_raises_raises_where_it_was_asked_for_and_not_into_training() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = SGD([parameter], lr=0.1)
    crossing = Crossing()
    crossing.open()
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            crossing.ask(lambda _: 1 // 0, lambda: False)
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        optimizer.step()
    crossing.close()
    assert len(raised) == 1


# --- which steps count ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaler that another test has left in this process would hide the losses."""
    monkeypatch.setattr(WATCHER, "find", lambda: find()._replace(scaled=False))


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    crossing = Crossing()
    watcher = Watcher(Wanted(str(tmp_path / "run"), 1, None, None), print, crossing)
    crossing.after = watcher.after
    crossing.open()
    yield watcher
    crossing.close()
    for each in watcher.close():
        assert each.monitor is not None


def trained(model: nn.Module, optimizers: list[Optimizer], steps: int) -> None:
    for _ in range(steps):
        loss: Tensor = model(torch.randint(50, (2, 9))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_that_takes_the_place_of_another_goes_on_with_the_run(watcher: Watcher, tmp_path: Path) -> None:
    """The first step of each is needed to know it; Adam's own count names the first watched one."""
    torch.manual_seed(0)
    model = decoder()
    old: Optimizer = Adam(model.parameters(), lr=1e-3)
    watcher.crossing.after = None
    trained(model, [old], 7)
    watcher.crossing.after = watcher.after
    trained(model, [old], 4)
    trained(model, [SGD(model.parameters(), lr=1e-3)], 4)
    watcher.close()
    run = attnwatch.open_run(tmp_path / "run")
    assert run.steps.tolist() == [8, 9, 10, 11, 12, 13]
    assert run.scalar("lr")[0].tolist() == run.scalar("loss")[0].tolist() == run.steps.tolist()
    assert not (tmp_path / "run-2").exists()


def test_when_the_optimizer_that_counted_steps_no_more_another_of_several_counts(
    watcher: Watcher, tmp_path: Path
) -> None:
    """Three steps of all, of which the first is needed to know them, and four of the other two."""
    torch.manual_seed(0)
    model = decoder()
    one, other, *rest = model.blocks.parameters()
    optimizers: list[Optimizer] = [SGD(part, lr=0.1) for part in (rest, [one], [other])]
    trained(model, optimizers, 3)
    trained(model, optimizers[1:], 4)
    watcher.close()
    run = attnwatch.open_run(tmp_path / "run")
    assert run.steps.tolist() == run.scalar("loss")[0].tolist() == [1, 2, 3, 4, 5, 6]


class Odd(Optimizer):
    """Neither a learning rate nor a state by parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]):
        super().__init__(parameters, {"rate": 0.01})
        self.state["step"] = 0  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["step"] += 1  # type: ignore[index,operator]
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad.sign() * 0.01


def test_an_optimizer_of_anybodys_own_kind_is_watched(watcher: Watcher, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = decoder()
    trained(model, [Odd(model.parameters())], 4)
    watcher.close()
    run = attnwatch.open_run(tmp_path / "run")
    assert run.steps.tolist() == run.scalar("loss")[0].tolist() == [1, 2, 3]


def test_two_optimizers_of_one_model_make_one_step(watcher: Watcher, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = decoder()
    optimizers: list[Optimizer] = [
        SGD(model.blocks.parameters(), lr=0.1), SGD([*model.embedding.parameters(), *model.head.parameters()], lr=0.2),
    ]  # fmt: skip
    trained(model, optimizers, 5)
    watcher.close()
    assert attnwatch.open_run(tmp_path / "run").steps.tolist() == [1, 2, 3, 4]
    assert {steps_done(optimizer) for optimizer in optimizers} == {1}


def test_a_model_that_nothing_trains_any_more_is_let_go_when_another_comes(watcher: Watcher, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        model = decoder()
        optimizer = SGD(model.parameters(), lr=0.1)
        trained(model, [optimizer], 3)
        del optimizer
        gc.collect()
    assert [each.model for each in watcher.watched] == [model]
    assert attnwatch.open_run(tmp_path / "run").ended
    assert not attnwatch.open_run(tmp_path / "run-2").ended


def test_an_optimizer_for_every_batch_does_not_have_the_process_searched_each_time(
    watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts have that train an input, or a copy of the model. With no time to spare only the first is looked at;
    steps and losses of the model are counted as ever. With time, the next one is."""
    looks: list[int] = []
    monkeypatch.setattr(WATCHER, "find", lambda: looks.append(1) or find()._replace(scaled=False))
    monkeypatch.setattr(WATCHER, "_FREE", -1.0)
    torch.manual_seed(0)
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    for turn in range(4):
        trained(model, [optimizer], 1)
        if turn == 3:
            monkeypatch.setattr(WATCHER, "_FREE", 1e6)
        noise = torch.full((1,), 1e9, requires_grad=True)
        inner = SGD([noise], lr=0.1)
        noise.sum().backward()
        inner.step()
    assert len(looks) == 2
    watcher.close()
    run = attnwatch.open_run(tmp_path / "run")
    steps, losses = run.scalar("loss")
    assert run.steps.tolist() == steps.tolist() == [1, 2, 3]
    assert losses.max() < 1e6


def test_optimizers_of_which_there_is_one_at_a_time_are_not_all_the_first(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(WATCHER, "find", lambda: looks.append(1) or find())
    monkeypatch.setattr(WATCHER, "_FREE", -1.0)
    for _ in range(3):
        noise = torch.ones(1, requires_grad=True)
        SGD([noise], lr=0.1).step()
    assert len(looks) == 1
    assert watcher.reason.endswith("; no time was left to look what later optimizers train")


def test_a_directory_that_cannot_be_written_is_named_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    crossing = Crossing()
    watcher = Watcher(Wanted(str(tmp_path / "file" / "run"), 1, None, None), print, crossing)
    crossing.after = watcher.after
    crossing.open()
    model = decoder()
    trained(model, [SGD(model.parameters(), lr=0.1)], 3)
    crossing.close()
    said = capsys.readouterr().out
    assert said.startswith("Decoder is not watched: expected ")
    assert said.count("\n") == 1


def test_what_a_forked_copy_has_of_a_watcher_is_its_parents(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watcher, "current", watcher)
    assert watching() is watcher
    watcher.process += 1
    assert watching() is None
