"""Which models are being trained in a process, and by which optimizers."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.recipes import Attention, Decoder, fused
from torch import nn
from torch.fx import Graph, GraphModule
from torch.optim import SGD, Adam, Optimizer

import attnwatch
from attnwatch.monitor.attach.finding import find, trained_models


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
    """In a process of its own: what other tests leave behind may hold a scaler."""
    script = """
import torch
from attnwatch.monitor.attach.finding import find
assert not find().scaled
switched_off = torch.amp.GradScaler("cpu", enabled=False)
assert not find().scaled
scaler = torch.amp.GradScaler("cpu")
assert find().scaled
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_layers_with_an_optimizer_each_are_one_model() -> None:
    """Also with an optimizer for each parameter, as those that step within the backward pass have."""
    model = decoder()
    optimizers = [SGD(part.parameters(), lr=0.1) for part in (model.embedding, *model.blocks, model.head)]
    ((home, own),) = found([model], *optimizers)
    assert (home, set(own) >= set(optimizers[1:-1])) == (model, True)

    stack = nn.Sequential(nn.Embedding(50, 16), *(nn.MultiheadAttention(16, 2) for _ in range(2)))
    ((home, _),) = found([stack], *(SGD([parameter], lr=0.1) for parameter in stack.parameters()))
    assert home is stack


def test_what_a_compiler_makes_of_a_model_is_not_the_model() -> None:
    """A compiled optimizer step leaves a module that holds the same parameters."""
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    graph, parameters = Graph(), {f"p{n}": x for n, x in enumerate(model.parameters())}
    graph.output([graph.get_attr(name) for name in parameters])
    made = GraphModule(parameters, graph)
    assert [id(x) for x in made.parameters()] == [id(x) for x in model.parameters()]
    assert [each.model for each in find().trained if optimizer in each.optimizers] == [model]


class Unmade(nn.Module):
    def __init__(self) -> None:
        """Forgets `super().__init__()`."""


def test_modules_that_are_not_whole_stand_in_nobodys_way() -> None:
    """One whose constructor has not run, a lazy one that has no shapes yet."""
    model, unmade = decoder(), Unmade()
    parameters = sum(x.numel() for x in model.parameters())
    model.unused = nn.LazyLinear(4)
    optimizer = SGD(model.parameters(), lr=0.1)
    trained = [each for each in find().trained if optimizer in each.optimizers]
    assert [(each.model, each.parameters) for each in trained] == [(model, parameters)]
    assert type(unmade) is Unmade


class NoHash(type):
    def __hash__(cls) -> int:
        raise TypeError("no hash")


class Unhashable(metaclass=NoHash):
    """A class that can be in no set."""


class Asks(nn.Module):
    def parameters(self, which: str) -> list[nn.Parameter]:  # type: ignore[override]
        return []


class Closed(nn.Module):
    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("not yet")

    __hash__ = None  # type: ignore[assignment]


def test_what_the_classes_of_others_do_when_asked_stands_in_nobodys_way() -> None:
    """They cannot be hashed, have a `parameters` of their own, or answer nothing."""
    closed = object.__new__(Closed)
    object.__setattr__(closed, "__dict__", dict(vars(nn.Module())))
    others = [Asks(), closed, [Unhashable()]]
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert [each.model for each in find().trained if optimizer in each.optimizers] == [model]
    assert len(others) == 3
