"""Tiny attention layers whose weights are known head by head, and one sampled step of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tests import reference
from torch import Tensor, nn

from attnwatch.hooks.layers import METRICS, Layer
from attnwatch.hooks.probe import Probe, Reading

B, T, E, H, D = 3, 7, 24, 4, 6
COMPARED = ("entropy", "entropy_ratio", "sink_mass", "first_key_mass", "logit_max")

Heads = tuple[Tensor, Tensor, Tensor]
"""q `[B, H, T, D]`, k and v `[B, Hk, T, D]`."""


class Parts(NamedTuple):
    """The weights of one layer, head by head: what tests pack into modules, and what they reckon with."""

    q: Tensor  # [H, D, E]
    k: Tensor  # [Hk, D, E]
    v: Tensor  # [Hk, D, E]
    q_bias: Tensor  # [H, D]
    k_bias: Tensor  # [Hk, D]

    def project(self, x: Tensor, memory: Tensor | None = None) -> Heads:
        """float64, biases included, of `x [B, T, E]`; keys and values of `memory [B, S, E]` if given."""
        memory = x if memory is None else memory
        q, k, v = (
            torch.einsum("bte,hde->bhtd", a.double(), w.double())
            for a, w in ((x, self.q), (memory, self.k), (memory, self.v))
        )
        return q + self.q_bias.double()[:, None], k + self.k_bias.double()[:, None], v


def parts(kv: int = H, bias: bool = False, seed: int = 0) -> Parts:
    """Random weights, large enough that the maps are neither uniform nor saturated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    w_q, w_k, w_v = (normal(n, D, E) * E**-0.5 * 1.5 for n in (H, kv, kv))
    return Parts(w_q, w_k, w_v, normal(H, D) * bias, normal(kv, D) * bias)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (B, T, E)), generator=torch.Generator().manual_seed(seed))


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """`weight [out, in]` as a layer."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def separate(layer: Any, x: Tensor) -> Heads:
    q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    return q, k, v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Mixer(nn.Module):
    """A layer that mixes tokens: `split(layer, x)` projects, `call(q, k, v)` attends. Named so that nothing about it
    says attention."""

    def __init__(
        self,
        weights: Parts,
        call: Callable[[Tensor, Tensor, Tensor], Tensor] = causal,
        split: Callable[[Any, Tensor], Heads] = separate,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if modules is None or not any(isinstance(module, nn.Linear) for module in modules.values()):
            self.q_proj = linear(weights.q.flatten(0, 1), weights.q_bias.flatten())
            self.k_proj = linear(weights.k.flatten(0, 1), weights.k_bias.flatten())
            self.v_proj = linear(weights.v.flatten(0, 1))
        for name, module in (modules or {}).items():
            setattr(self, name, module)
        self.o_proj = linear(tokens(E, H * D, seed=11) / E**0.5)
        self.call, self.split = call, split

    def forward(self, x: Tensor) -> Tensor:
        y = self.call(*self.split(self, x))
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    """`mix` inside a residual block, a norm and a head: projections that are not attention's stand around."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.mix = mix
        self.norm = nn.LayerNorm(E)
        self.head = nn.Linear(E, 11)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        out: Tensor = self.head(self.norm(x + self.mix(x, **call)))
        return out


class Tower(nn.Module):
    """Layers, each in a residual block; `wrap` calls one: directly, or through an activation checkpoint."""

    def __init__(
        self, *layers: nn.Module, wrap: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.wrap(layer, x)
        return x


def normed(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return layer.q_norm(q), layer.k_norm(k), v


def grouped(seed: int = 0, call: Callable[[Tensor, Tensor, Tensor], Tensor] = causal) -> Mixer:
    """Two key heads for four of queries, biases, query-key norm with gains away from 1."""
    norms = {f"{side}_norm": nn.RMSNorm(D) for side in "qk"}
    for n, norm in enumerate(norms.values()):
        norm.weight.data = tokens(D, seed=20 + 2 * seed + n).abs() + 0.3
    return Mixer(parts(kv=2, bias=True, seed=seed), call, normed, norms)


def step(probe: Probe, model: nn.Module, *inputs: Any, look: bool = True, **call: Any) -> Reading:
    """One sampled step, forward and backward."""
    probe.arm(look=look)
    model(*inputs, **call).square().sum().backward()
    return probe.finish()


def sampled(model: nn.Module, *inputs: Any, **call: Any) -> Reading:
    """What every row of a step tells; a second step where a layer's weights are found only after the first."""
    probe = Probe(model.train(), rows=None, sequences=1000)
    reading = step(probe, model, *inputs, **call)
    return step(probe, model, *inputs, **call) if probe.due else reading


def layer_of(reading: Reading, name: str = "mix") -> Layer:
    found = {layer.name: layer for layer in reading.layers}
    assert name in found, f"{name} is not among {list(found)}; problems: {reading.problems}"
    return found[name]


def values_of(reading: Reading, name: str = "mix") -> dict[str, NDArray[np.float32]]:
    """Metric -> `[heads]` of one layer."""
    row = reading.values[:, reading.measured.index(name), : layer_of(reading, name).heads]
    return dict(zip([metric.name for metric in METRICS], row, strict=True))


def assert_statistics(reading: Reading, q: Tensor | None, k: Tensor | None, name: str = "mix", **call: Any) -> None:
    """The layer's maps are those of q `[B, H, T, D]` and k, as slow float64 loops make them."""
    expected = reference.attention_statistics(q, k, **call)
    found = values_of(reading, name)
    for metric in COMPARED:
        np.testing.assert_allclose(found[metric], expected[metric], rtol=1e-5, atol=1e-5, err_msg=metric)


def assert_spectrum(reading: Reading, w_q: Tensor, w_k: Tensor, name: str = "mix") -> None:
    """The layer is verified, and its spectra are those of w_q `[H, D, E]` and w_k `[Hk, D, E]`."""
    layer = layer_of(reading, name)
    assert layer.state == "verified", layer.note
    found = values_of(reading, name)
    for metric, expected in reference.spectrum(w_q.double().numpy(), w_k.double().numpy()).items():
        np.testing.assert_allclose(found[metric], expected, rtol=1e-4, err_msg=metric)
