"""Every way in which models are compiled, and sampled steps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.models import Mixer, Tower, grouped, parts
from torch import Tensor

from attnwatch.hooks.probe import Probe, Reading

NOISE = (
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:`torch.jit.script_method` is deprecated",
    "ignore:dynamo_pgo force disabled",
    "ignore:Mismatch dtype between input and weight",
)
"""Warnings of the compiler's own; the last is of a norm under autocast."""

NAMES = ("layers.0", "layers.1")
Call = Callable[..., Tensor]


def tower(**options: Any) -> Tower:
    """Two equal layers with grouped keys: the cheapest to compile."""
    return Tower(*(Mixer(parts(kv=2, seed=seed)) for seed in (0, 1)), **options).train()


def normed_tower(**options: Any) -> Tower:
    """One layer with biases and query-key norm as well."""
    return Tower(grouped(), **options).train()


def whole(model: Any, **options: Any) -> Call:
    call: Call = torch.compile(model, **options)
    return call


def in_place(model: Any, **options: Any) -> Call:
    model.compile(**options)
    called: Call = model
    return called


def each_layer(model: Any, **options: Any) -> Call:
    for layer in model.layers:
        layer.compile(**options)
    called: Call = model
    return called


def each_layer_replaced(model: Any, **options: Any) -> Call:
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer, **options)
    called: Call = model
    return called


def regions(model: Any, **options: Any) -> Call:
    """What the layers call, not the layers."""
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, **options)
    called: Call = model
    return called


def a_function(model: Any, **options: Any) -> Call:
    """That is given the model; no module is compiled."""
    call: Call = torch.compile(model.__call__, **options)
    return call


WAYS = [whole, in_place, each_layer, each_layer_replaced, regions, a_function]


def learn(call: Call, x: Tensor) -> Tensor:
    loss = call(x).float().square().mean()
    loss.backward()
    return loss


def sample(probe: Probe, call: Call, x: Tensor, look: bool = True) -> Reading:
    probe.arm(look=look)
    learn(call, x)
    return probe.finish()


def states(reading: Reading) -> dict[str, str]:
    return {layer.name: layer.state for layer in reading.layers}
