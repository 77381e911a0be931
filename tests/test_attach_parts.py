"""What attaching is made of: which models are found, what of the loss is seen, when a process may be touched."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.recipes import Attention, Decoder, fused
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import attnwatch
from attnwatch.monitor.attach.crossing import Crossing
from attnwatch.monitor.attach.finding import find, trained_models
from attnwatch.monitor.attach.losses import Losses
from attnwatch.monitor.attach.wanted import Wanted
from attnwatch.monitor.attach.watcher import Watcher, steps_done

HOOKS = import_module("torch.optim.optimizer")._global_optimizer_post_hooks


def decoder() -> Decoder:
    return Decoder(partial(Attention, fused))


def found(modules: list[nn.Module], *optimizers: Optimizer) -> list[tuple[nn.Module, list[Optimizer]]]:
    every = [inner for module in modules for inner in module.modules()]
    return [(each.model, list(each.optimizers)) for each in trained_models(every, optimizers)]


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, **more: nn.Module):
        super().__init__()
        self.model = model
        for name, module in more.items():
            setattr(self, name, module)


# --- which models -----------------------------------------------------------------------------------------------------


def test_the_model_is_the_outermost_module_with_the_optimizers_parameters() -> None:
    """Not an average of it that nobody trains, nor its teacher; also when only a part of it is trained."""
    model, average = decoder(), decoder()
    for parameters in (model.parameters(), model.blocks[1].parameters(), [model.head.weight]):
        optimizer = SGD(parameters, lr=0.1)
        assert found([average, model], optimizer) == [(model, [optimizer])]
    whole = Wrapper(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert found([average, whole], optimizer) == [(whole, [optimizer])]
    assert found([Wrapper(model, teacher=average), whole], optimizer) == [(whole, [optimizer])]


def test_what_wraps_a_model_for_speed_or_for_several_processes_is_not_the_model() -> None:
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert found([compiled], optimizer) == [(model, [optimizer])]
    assert found([nn.DataParallel(model)], optimizer) == [(model, [optimizer])]


def test_two_optimizers_of_one_model_are_one_training_and_of_two_parts_are_two() -> None:
    model = decoder()
    matrices = SGD(model.blocks.parameters(), lr=0.1)
    rest = Adam([*model.embedding.parameters(), *model.head.parameters()])
    assert found([model], rest, matrices) == [(model, [matrices, rest])]

    twins = nn.ModuleDict({"generator": decoder(), "judge": decoder()})
    first, second = (SGD(part.parameters(), lr=0.1) for part in twins.values())
    apart = found([twins], first, second)
    assert sorted(apart, key=lambda pair: pair[0] is twins["judge"]) == [
        (twins["generator"], [first]), (twins["judge"], [second]),
    ]  # fmt: skip


def test_a_judge_without_attention_leaves_the_whole_to_the_generator() -> None:
    both = nn.ModuleDict({"generator": decoder(), "judge": nn.Linear(4, 4)})
    first, second = (SGD(part.parameters(), lr=0.1) for part in both.values())
    assert found([both], second, first) == [(both, [first])]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_live_models_are_found_also_behind_a_frozen_collector(is_frozen: bool) -> None:
    """Trainers freeze the collector's heap for speed; then what the running functions hold is looked at."""
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    if is_frozen:
        gc.freeze()
    try:
        trained = find().trained
    finally:
        gc.unfreeze()
    assert [list(each.optimizers) for each in trained if each.model is model] == [[optimizer]]


def test_what_the_script_watches_itself_is_known(tmp_path: Path) -> None:
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attnwatch.watch(model, run=tmp_path / "run", report=False) as monitor:
        assert [each.is_watched for each in find().trained if each.model is model] == [True]
        monitor.step()
    assert [each.is_watched for each in find().trained if each.model is model] == [False]
    assert optimizer.param_groups


def test_a_loss_that_a_scaler_multiplies_is_known() -> None:
    assert not find().scaled
    scaler = torch.amp.GradScaler("cpu")
    assert find().scaled
    assert scaler.is_enabled()


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
    assert losses.take() is None
    assert x.grad is not None
    assert x.grad.tolist() == [0.25 + 2 + 7 + 2 + 0.25, 0.25 + 2 + 7 + 2]


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


def test_hooks_come_and_go_while_another_thread_makes_steps() -> None:
    """torch walks over its dictionary of hooks in every step, and would raise if it changed meanwhile."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = SGD([parameter], lr=0.1)
    register = import_module("torch.optim.optimizer").register_optimizer_step_post_hook
    users = [register(lambda *_: time.sleep(1e-4)) for _ in range(9)]  # where threads switch
    failures: list[Exception] = []
    stop = threading.Event()

    def train() -> None:
        try:
            while not stop.is_set():
                optimizer.step()
                time.sleep(1e-4)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for turn in range(20):
            time.sleep(turn % 5 * 3e-4)  # so that it comes at all points of a step
            crossing = Crossing()
            crossing.open()
            assert crossing.ask(lambda each: each is optimizer, lambda: bool(failures))
            crossing.close()
    finally:
        stop.set()
        thread.join()
        for user in users:
            user.remove()
    assert failures == []
    assert len(HOOKS) == 0


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
