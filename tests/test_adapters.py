"""Adapters: a user's own layer is told by match, weights and record; what is wrong in one never reaches training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.families import watched
from tests import zoo_own
from tests.models import assert_spectrum, assert_statistics, layer_of, step, values_of
from torch import Tensor, nn

import attnwatch
from attnwatch.hooks.probe import Probe, Reading

H, D = zoo_own.H, zoo_own.D


class Unseen(nn.Module):
    """Attention by an operator that torch knows nothing of, behind one projection whose rows lie in a drawn order."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Linear(32, 96)
        self.register_buffer("order", torch.randperm(96, generator=torch.Generator().manual_seed(7)))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.mixer(x)[..., self.order].chunk(3, -1))

    def weights(self) -> tuple[Tensor, Tensor]:
        q, k, _ = self.mixer.weight.detach()[self.order].chunk(3)
        return q.unflatten(0, (H, D)), k.unflatten(0, (H, D))

    def forward(self, x: Tensor) -> Tensor:
        return zoo_own.joined(torch.ops.own.attend(*self.heads(x)))


@torch.library.custom_op("own::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return zoo_own.by_exponentials(q, k, v)


def backward(ctx: Any, grad: Tensor) -> Any:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        return torch.autograd.grad(zoo_own.by_exponentials(*inputs), inputs, grad)


attend.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "inputs", inputs))


class Told:
    """All three methods."""

    def match(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, Unseen)

    def weights(self, module: Unseen) -> tuple[Tensor, Tensor, str]:
        return (*module.weights(), "rows in an order of our own")

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> attnwatch.Attention | None:
        if "own.attend" not in str(func):
            return None
        return attnwatch.Attention(args[0].detach(), args[1].detach(), causal=True)


def model() -> Any:
    return zoo_own.made(Unseen())


def read(model: nn.Module, *adapters: Any) -> Reading:
    probe = Probe(model, rows=None, sequences=100, adapters=adapters)
    return step(probe, model, zoo_own.tokens())


def expected(model: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        q, k, _ = model.attention.heads(zoo_own.tokens())
    return q, k


def test_without_an_adapter_such_a_layer_is_not_seen() -> None:
    assert watched(model(), zoo_own.tokens()).measured == ()


def test_record_gives_the_logits_and_weights_the_spectrum() -> None:
    watched_model = model()
    reading = read(watched_model, Told())
    assert_statistics(reading, *expected(watched_model), name="attention", causal=True)
    assert_spectrum(reading, *watched_model.attention.weights(), name="attention")
    assert layer_of(reading, "attention").note == "rows in an order of our own; q and k as given"
    assert reading.problems == ()


def test_record_alone_leaves_the_weights_to_the_proof() -> None:
    """Which fails: nobody could guess their order."""

    class Recorded:
        match, record = Told.match, Told.record

    watched_model = model()
    reading = read(watched_model, Recorded())
    assert_statistics(reading, *expected(watched_model), name="attention", causal=True)
    assert layer_of(reading, "attention").state == "logits_only"
    assert np.isnan(values_of(reading, "attention")["qk_rank"]).all()


def test_weights_alone_leave_the_call_to_the_usual_ways() -> None:
    """Attention by SDPA between rows in an order of their own."""

    class Usual(Unseen):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            return zoo_own.joined(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    class Weighed:
        match, weights = Told.match, Told.weights

    watched_model: Any = zoo_own.made(Usual())
    reading = read(watched_model, Weighed())
    assert_spectrum(reading, *watched_model.attention.weights(), name="attention")
    assert "output made again" in layer_of(reading, "attention").note
    assert layer_of(read(watched_model), "attention").state == "logits_only"


def test_scores_alone_are_enough() -> None:
    """A sigmoid attention tells its logits, and where its weights are."""

    class Scored:
        def match(self, name: str, module: nn.Module) -> bool:
            return name == "attention"

        def weights(self, module: zoo_own.Kernel) -> tuple[Tensor, Tensor, str]:
            return module.q_proj.weight.unflatten(0, (H, D)), module.k_proj.weight.unflatten(0, (H, D)), ""

        def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> attnwatch.Attention | None:
            return attnwatch.Attention(None, None, scores=args[0]) if func is torch.sigmoid else None

    watched_model: Any = zoo_own.made(zoo_own.Kernel(zoo_own.sigmoid))
    reading = read(watched_model, Scored())
    module = watched_model.attention
    with torch.no_grad():
        q, k = (zoo_own.heads_of(part(zoo_own.tokens())) for part in (module.q_proj, module.k_proj))
        scores = q @ k.mT * D**-0.5 - math.log(12)
    assert_statistics(reading, None, None, name="attention", scores=scores)
    w_q, w_k = (part.weight.detach().unflatten(0, (H, D)) for part in (module.q_proj, module.k_proj))
    assert_spectrum(reading, w_q, w_k, name="attention")
    assert layer_of(reading, "attention").note.startswith("weights as the adapter gives them")


def test_without_match_an_adapter_is_for_all_that_looks_like_attention() -> None:
    class Everywhere:
        record = Told.record

    class OwnAttention(Unseen):
        pass

    assert read(zoo_own.made(OwnAttention()), Everywhere()).measured == ("attention",)
    assert read(model(), Everywhere()).measured == ()  # `Unseen` does not look like it


def test_a_matched_module_without_weights_of_its_own_is_a_layer_too() -> None:
    class Kernel(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = torch.ops.own.attend(q, k, v)
            return out

    class Outer(Unseen):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = Kernel()

        def forward(self, x: Tensor) -> Tensor:
            return zoo_own.joined(self.kernel(*self.heads(x)))

    class Recorded:
        record = Told.record

        def match(self, name: str, module: nn.Module) -> bool:
            return name == "attention.kernel"

    watched_model: Any = zoo_own.made(Outer())
    reading = read(watched_model, Recorded())
    assert_statistics(reading, *expected(watched_model), name="attention.kernel", causal=True)


def test_the_first_that_matches_is_asked() -> None:
    class Other(Told):
        def weights(self, module: Unseen) -> tuple[Tensor, Tensor, str]:
            return (*module.weights(), "the other")

    assert "the other" in layer_of(read(model(), Other(), Told()), "attention").note
    assert "our own" in layer_of(read(model(), Told(), Other()), "attention").note


class Raises(Told):
    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> attnwatch.Attention | None:
        raise KeyError("oops")


class Flat(Told):
    def weights(self, module: Unseen) -> tuple[Tensor, Tensor, str]:
        q, k = module.weights()
        return q.flatten(0, 1), k.flatten(0, 1), ""


class Transposed(Told):
    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> attnwatch.Attention | None:
        if "own.attend" not in str(func):
            return None
        return attnwatch.Attention(args[0], args[1].transpose(2, 3))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (Raises(), "KeyError: 'oops'"),
        (Flat(), "expected weights() to give W_q [4, d, in] and W_k [kv heads, d, in]; found [32, 32] and [32, 32]"),
        (Transposed(), "is one of them transposed?"),
    ],
)
def test_a_wrong_adapter_is_named_once_and_training_goes_on(adapter: Any, said: str) -> None:
    probe = Probe(model(), rows=None, adapters=[adapter])
    problems = []
    for _ in range(2):
        problems += step(probe, probe.model, zoo_own.tokens()).problems
    named = [text for where, text in problems if where == "attention"]
    assert len(named) == 1
    assert said in named[0]


def test_watch_takes_adapters(tmp_path: Path) -> None:
    """Also for a model in which nothing else speaks of attention."""
    watched_model = model()
    with attnwatch.watch(watched_model, run=tmp_path / "run", every=1, adapters=[Told()], report=False) as monitor:
        watched_model(zoo_own.tokens()).square().mean().backward()
        monitor.step()
        assert [(layer.name, layer.state) for layer in monitor.coverage] == [("attention", "verified")]


class Broken:
    def match(self, name: str, module: nn.Module) -> bool:
        return bool(module.no_such_attribute)


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        ([object()], "expected adapters with a method match, weights or record; found <object object"),
        (Told(), "expected adapters to be a list, found"),
        ([Broken()], "one raised AttributeError: 'Model' object has no attribute 'no_such_attribute'"),
    ],
)
def test_what_is_no_adapter_is_said_at_once(adapters: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(attnwatch.UsageError) as error:
        attnwatch.watch(model(), run=tmp_path / "run", adapters=adapters)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
