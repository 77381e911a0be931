"""Attention that has no softmax call to see: uncovered and named, or told by `attnwatch.observe`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.models import (
    D,
    E,
    H,
    Mixer,
    Model,
    assert_spectrum,
    assert_statistics,
    causal,
    parts,
    sampled,
    step,
    tokens,
    values_of,
)
from torch import Tensor, nn

import attnwatch
from attnwatch.hooks.probe import Probe


class Sigmoid(nn.Module):
    """Attention without a softmax; `tell` hands q and k over."""

    def __init__(self, tell: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(E, E) for _ in range(3))
        self.tell = tell

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.to_q, self.to_k, self.to_v))
        if self.tell:
            attnwatch.observe(self, q, k, scale=0.3, causal=True)
        return (torch.sigmoid(q @ k.mT * 0.3) @ v).transpose(1, 2).flatten(2)


class Linear(nn.Module):
    """Linear attention: the softmax is over features."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, -1))
        return (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mix", [Sigmoid(False), Linear()])
def test_attention_that_is_not_seen_is_uncovered(mix: nn.Module) -> None:
    reading = sampled(Model(mix), tokens())
    [layer] = reading.layers
    assert (layer.name, layer.state) == ("mix", "uncovered")
    assert layer.note.startswith("looks like attention, but no call was seen in it")
    assert reading.measured == ()
    assert reading.problems[0][0] == "model"


def test_observe() -> None:
    """q and k handed over are measured, and their weights proved."""
    mix = Sigmoid(True)
    reading = sampled(Model(mix), tokens())
    w_q, w_k = (p.weight.detach().unflatten(0, (H, D)) for p in (mix.to_q, mix.to_k))
    with torch.no_grad():
        q, k = (p(tokens()).unflatten(-1, (H, D)).transpose(1, 2) for p in (mix.to_q, mix.to_k))
    assert_statistics(reading, q, k, scale=0.3, causal=True)
    assert_spectrum(reading, w_q, w_k)


def test_observe_tells_nothing_outside_of_a_sample() -> None:
    mix = Sigmoid(True)
    model = Model(mix).train()
    probe = Probe(model)
    model(tokens())
    attnwatch.observe(mix, tokens(), tokens())
    probe.arm(look=True)
    attnwatch.observe(nn.Linear(2, 2), tokens(), tokens())  # not a part of the model
    reading = probe.finish()
    assert reading.measured == ()


def test_observe_never_raises() -> None:
    """Wrong shapes are a problem that is named, and the layer is off."""
    mix = Sigmoid(True)
    model = Model(mix).train()
    probe = Probe(model)
    probe.arm(look=True)
    model(tokens())
    attnwatch.observe(mix, tokens(), tokens()[:, :2, :3])
    reading = probe.finish()
    [(where, text)] = reading.problems
    assert where == "mix"
    assert text.startswith("measuring failed and is off for this layer: ")


def test_a_failure_is_confined_to_its_layer() -> None:
    """A layer whose measuring breaks is named once and off; the other one and the training go on."""
    first, second = Mixer(parts()), Mixer(parts())

    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attnwatch.observe(first, q, k[..., :-1])
        return causal(q, k, v)

    first.call = broken
    model = nn.Sequential(first, second).train()
    probe = Probe(model)
    told = [step(probe, model, tokens()) for _ in range(2)]
    assert [[where for where, _ in reading.problems] for reading in told] == [["0"], []]
    assert not np.isnan(values_of(told[1], "1")["entropy"]).any()
