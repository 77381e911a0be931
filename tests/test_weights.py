"""Which rows are W_q and W_k: found in every packing that code uses, proved, and never claimed where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import (
    B,
    D,
    E,
    H,
    Heads,
    Mixer,
    Model,
    Parts,
    T,
    assert_spectrum,
    assert_statistics,
    causal,
    layer_of,
    linear,
    parts,
    sampled,
    separate,
    step,
    tokens,
)
from torch import Tensor, nn

from attnwatch.hooks.probe import Probe

Split = Callable[[Any, Tensor], Heads]


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def flat(*weights: Tensor) -> Tensor:
    return torch.cat([w.flatten(0, 1) for w in weights])


def fused(name: str, rows: Tensor) -> dict[str, nn.Module]:
    return {name: linear(rows)}


def contiguous(layer: Any, x: Tensor) -> Heads:
    """[q of all heads; k of all heads; v of all heads]"""
    kv = (layer.qkv.out_features // D - H) // 2
    q, k, v = (heads_of(y) for y in layer.qkv(x).split((H * D, kv * D, kv * D), -1))
    return q, k, v


def unbound(layer: Any, x: Tensor) -> Heads:
    q, k, v = layer.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def per_head(layer: Any, x: Tensor) -> Heads:
    """[q k v] of head after head."""
    q, k, v = layer.query_key_value(x).view(*x.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, -1)
    return q, k, v


def per_group(layer: Any, x: Tensor) -> Heads:
    """[queries of the group, k, v] of key head after key head."""
    y = layer.query_key_value(x).unflatten(-1, (-1, H // 2 + 2, D))
    q, k, v = y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def innermost(layer: Any, x: Tensor) -> Heads:
    """[h][d][q k v]"""
    q, k, v = layer.to_qkv(x).view(*x.shape[:2], H, D, 3).transpose(1, 2).unbind(-1)
    return q, k, v


def feature_major(layer: Any, x: Tensor) -> Heads:
    """[d][h]"""
    q, k, v = (p(x).view(*x.shape[:2], D, H).permute(0, 3, 1, 2) for p in (layer.to_q, layer.to_k, layer.to_v))
    return q, k, v


def keys_and_values(layer: Any, x: Tensor) -> Heads:
    k, v = layer.to_kv(x).chunk(2, -1)
    return heads_of(layer.to_q(x)), heads_of(k), heads_of(v)


def keys_and_values_per_head(layer: Any, x: Tensor) -> Heads:
    k, v = layer.to_kv(x).unflatten(-1, (-1, 2, D)).unbind(-2)
    return heads_of(layer.to_q(x)), k.transpose(1, 2), v.transpose(1, 2)


def by_group(w: Parts) -> Tensor:
    return torch.cat([torch.cat([w.q.unflatten(0, (2, -1))[g].flatten(0, 1), w.k[g], w.v[g]]) for g in range(2)])


FULL = parts()
GROUPED = parts(kv=2)
MAJOR = [w.transpose(0, 1) for w in FULL[:3]]
PACKED: dict[str, tuple[Parts, Split, dict[str, nn.Module]]] = {
    "contiguous": (FULL, contiguous, fused("qkv", flat(*FULL[:3]))),
    "contiguous, unbound": (FULL, unbound, fused("qkv", flat(*FULL[:3]))),
    "contiguous, grouped": (GROUPED, contiguous, fused("qkv", flat(*GROUPED[:3]))),
    "per head": (FULL, per_head, fused("query_key_value", torch.cat(FULL[:3], 1).flatten(0, 1))),
    "per group": (GROUPED, per_group, fused("query_key_value", by_group(GROUPED))),
    "innermost": (FULL, innermost, fused("to_qkv", torch.stack(FULL[:3], 2).flatten(0, 2))),
    "feature, head": (
        FULL,
        feature_major,
        {f"to_{n}": linear(w.flatten(0, 1)) for n, w in zip("qkv", MAJOR, strict=True)},
    ),
    "keys and values": (
        GROUPED,
        keys_and_values,
        {"to_q": linear(flat(GROUPED.q)), "to_kv": linear(flat(*GROUPED[1:3]))},
    ),
    "keys and values per head": (
        GROUPED,
        keys_and_values_per_head,
        {"to_q": linear(flat(GROUPED.q)), "to_kv": linear(torch.cat(GROUPED[1:3], 1).flatten(0, 1))},
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packings(name: str) -> None:
    """The layout of a fused projection is proved, whichever it is."""
    weights, split, modules = PACKED[name]
    reading = sampled(Model(Mixer(weights, causal, split, modules)), tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k, causal=True)
    assert_spectrum(reading, weights.q, weights.k)
    assert layer_of(reading).kv_heads == len(weights.k)


def test_keys_shared_by_all_heads() -> None:
    weights = parts(kv=1, bias=True)
    reading = sampled(Model(Mixer(weights)), tokens())
    assert_spectrum(reading, weights.q, weights.k)
    assert layer_of(reading).kv_heads == 1


def test_one_projection_for_queries_and_keys() -> None:
    """The same weight makes queries of some tokens and keys of others: found, and done with, in two samples at most."""
    memory = tokens(seed=4)

    def split(layer: Any, x: Tensor) -> Heads:
        return heads_of(layer.both(x)), heads_of(layer.both(memory)), heads_of(layer.v_proj(memory))

    weights = FULL._replace(k=FULL.q)
    modules = {"both": linear(flat(FULL.q)), "v_proj": linear(flat(FULL.v))}
    model = Model(Mixer(weights, causal, split, modules)).train()
    probe = Probe(model, rows=None)
    readings = [step(probe, model, tokens()) for _ in range(2)]
    assert not probe.due
    assert_spectrum(readings[1], FULL.q, FULL.q)
    q, k, _ = weights.project(tokens(), memory)
    assert_statistics(readings[1], q, k, causal=True)


@pytest.mark.parametrize("length", [5, 2 * T])
def test_keys_of_another_length(length: int) -> None:
    """Cross attention: keys and values, fused, of a memory."""
    memory = tokens(B, length, E, seed=4)

    def split(layer: Any, x: Tensor) -> Heads:
        k, v = layer.to_kv(memory).chunk(2, -1)
        return heads_of(layer.to_q(x)), heads_of(k), heads_of(v)

    modules = {"to_q": linear(flat(FULL.q)), "to_kv": linear(flat(*FULL[1:3]))}
    reading = sampled(Model(Mixer(FULL, F.scaled_dot_product_attention, split, modules)), tokens())
    q, k, _ = FULL.project(tokens(), memory)
    assert_statistics(reading, q, k)
    assert_spectrum(reading, FULL.q, FULL.k)


class Conv1D(nn.Module):
    """GPT-2's projection: `addmm` with a weight of (in, out)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.t().contiguous())
        self.bias = nn.Parameter(torch.ones(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def by_addmm(layer: Any, x: Tensor) -> Heads:
    q, k, v = (heads_of(y) for y in layer.c_attn(x).chunk(3, -1))
    return q, k, v


def test_a_weight_of_in_and_out() -> None:
    mixer = Mixer(FULL, causal, by_addmm, {"c_attn": Conv1D(flat(*FULL[:3]))})
    assert_spectrum(sampled(Model(mixer), tokens()), FULL.q, FULL.k)


class Bare(nn.Module):
    """Parameters without layers: `w [3, out, in]` or `[3, in, out]`."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], transposed: bool) -> None:
        super().__init__()
        w = torch.stack([w.flatten(0, 1) for w in FULL[:3]])
        self.w = nn.Parameter(w.mT.contiguous() if transposed else w)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(self.product(x, w)) for w in self.w)
        return causal(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("product", "transposed"),
    [
        (lambda x, w: x @ w.t(), False),
        (lambda x, w: x @ w, True),
        (lambda x, w: torch.matmul(x, w.T), False),
        (lambda x, w: F.linear(x, w), False),
        (lambda x, w: torch.mm(x.flatten(0, 1), w).view(B, T, -1), True),
        (lambda x, w: torch.einsum("bti,oi->bto", x, w), False),
        (lambda x, w: torch.einsum("bti,io->bto", x, w), True),
    ],
)
def test_bare_parameters(product: Callable[[Tensor, Tensor], Tensor], transposed: bool) -> None:
    assert_spectrum(sampled(Model(Bare(product, transposed)), tokens()), FULL.q, FULL.k)


class Headed(nn.Module):
    """Weights with a dimension of heads, `[H, in, d]`, as in JAX-born code."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(w.mT.contiguous()) for w in FULL[:3])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,hid->bhtd", x, w) for w in (self.w_q, self.w_k, self.w_v))
        return causal(q, k, v).transpose(1, 2).flatten(2)


def test_weights_with_a_dimension_of_heads() -> None:
    assert_spectrum(sampled(Model(Headed()), tokens()), FULL.q, FULL.k)


def rotated(q: Tensor, dims: int, interleaved: bool) -> Tensor:
    """Rotary embedding of the first `dims` features."""
    x, rest = q[..., :dims], q[..., dims:]
    angle = torch.arange(q.shape[-2])[:, None] * 0.7 ** torch.arange(dims // 2)
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [D, 4])
@pytest.mark.parametrize("norm", [False, True])
def test_rotary_embeddings(dims: int, interleaved: bool, norm: bool) -> None:
    """Both pairings, of all features or of a part, with and without a norm before: the proof does not see them."""
    weights = parts(kv=2, bias=not norm)
    modules = {"q_norm": nn.RMSNorm(D), "k_norm": nn.RMSNorm(D)} if norm else {}

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = separate(layer, x)
        if norm:
            q, k = layer.q_norm(q), layer.k_norm(k)
        return rotated(q, dims, interleaved), rotated(k, dims, interleaved), v

    reading = sampled(Model(Mixer(weights, causal, split, modules)), tokens())
    assert_spectrum(reading, weights.q, weights.k)
    assert layer_of(reading).qk_norm == ("rms per head" if norm else "")


def test_queries_scaled_before_the_product() -> None:
    """`q * d ** -0.5` with scale 1: the maps are the same, the weights are as they are."""
    weights = parts(bias=True)

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = separate(layer, x)
        return q * D**-0.5, k, v

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)

    reading = sampled(Model(Mixer(weights, call, split)), tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k)
    assert_spectrum(reading, weights.q, weights.k)


@pytest.mark.parametrize("shape", [(B, T), (T, T), (1, T), (B, 1), (5, 40)])
def test_sequence_first(shape: tuple[int, int]) -> None:
    """Activations `[T, B, E]`, also where there are as many sequences as positions."""
    weights = parts(bias=True)

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = (
            p(x.transpose(0, 1)).unflatten(-1, (-1, D)).permute(1, 2, 0, 3)
            for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        return q, k, v

    x = tokens(*shape, E)
    assert_spectrum(sampled(Model(Mixer(weights, causal, split)), x), weights.q, weights.k)


def test_a_model_with_more_layers_than_are_remembered_in_one_module() -> None:
    """Layers written out in one forward: every call has its own weights, by the order of the calls."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [parts(seed=n, bias=True) for n in range(3)]
            self.w = nn.ParameterList([flat(*w[:3]) for w in self.layers])

        def forward(self, x: Tensor) -> Tensor:
            for w in self.w:
                q, k, v = (heads_of(y) for y in F.linear(x, w).chunk(3, -1))
                x = x + causal(q, k, v).transpose(1, 2).flatten(2)
            return x

    model = Whole()
    reading = sampled(model, tokens())
    assert [layer.name for layer in reading.layers] == ["Whole", "Whole#1", "Whole#2"]
    for layer, weights in zip(reading.layers, model.layers, strict=True):
        assert_spectrum(reading, weights.q, weights.k, layer.name)
