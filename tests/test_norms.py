"""Query-key norms: named, folded into the spectrum, and the bound that they set on the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
    values_of,
)
from torch import Tensor, nn

from attnwatch.hooks.probe import Probe, Reading

GENERATOR = torch.Generator().manual_seed(8)


def gain(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR) * 2 + 0.1


def perturbed(module: nn.Module, *names: str) -> nn.Module:
    """The layer away from its start, where every gain is 1 and no two layouts can be told apart by it."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not names or name in names:
                parameter.copy_(gain(*parameter.shape))
    return module


class UnitOffsetRMSNorm(nn.Module):
    """Written by hand, with `1 + w` as gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class HeadwiseRMSNorm(nn.Module):
    """A gain for every head: `[heads, 1, d]`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(heads, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * D**0.5 * self.g


def normed(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return layer.q_norm(q), layer.k_norm(k), v


def normed_per_token(layer: Any, x: Tensor) -> Heads:
    """Before the heads' dimension is moved: `[B, T, H, d]`."""
    q, k, v = (p(x).unflatten(-1, (-1, D)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    return layer.q_norm(q).transpose(1, 2), layer.k_norm(k).transpose(1, 2), v.transpose(1, 2)


def normed_across(layer: Any, x: Tensor) -> Heads:
    q, k, v = layer.q_norm(layer.q_proj(x)), layer.k_norm(layer.k_proj(x)), layer.v_proj(x)
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
    return q, k, v


def captured(mixer: Mixer) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        q, k, _ = mixer.split(mixer, tokens())
    return q, k


def assert_bound(reading: Reading, expected: Tensor) -> None:
    """`expected [H]` or `[]`; bound_use is its share that the largest logit takes."""
    values = values_of(reading)
    np.testing.assert_allclose(values["logit_bound"], expected.detach().double().expand(H), rtol=1e-4)
    np.testing.assert_allclose(values["bound_use"], values["logit_max"] / values["logit_bound"], rtol=1e-5)


MAKERS: dict[str, tuple[Callable[[int], nn.Module], str, Callable[[Any], Tensor]]] = {
    "nn.RMSNorm": (lambda heads: nn.RMSNorm(D), "rms per head", lambda m: m.weight),
    "nn.LayerNorm": (lambda heads: nn.LayerNorm(D, bias=False), "layer per head", lambda m: m.weight),
    "1 + w": (lambda heads: UnitOffsetRMSNorm(D), "rms per head", lambda m: 1 + m.weight),
    "gain a head": (HeadwiseRMSNorm, "rms per head", lambda m: m.g[:, 0]),
}


@pytest.mark.parametrize("start", [True, False], ids=["at the start", "in training"])
@pytest.mark.parametrize("kv", [H, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_norms_of_every_head(name: str, kv: int, start: bool) -> None:
    """scale * d * max|gain_q| * max|gain_k|; the gain is folded in feature by feature."""
    make, kind, gain_of = MAKERS[name]
    modules = {"q_norm": make(H), "k_norm": make(kv)}
    if not start:
        modules = {key: perturbed(module) for key, module in modules.items()}
    weights = parts(kv, bias=True)
    mixer = Mixer(weights, causal, normed, modules)
    reading = sampled(Model(mixer), tokens())
    g_q, g_k = (gain_of(m).detach().expand(n, D) for m, n in zip(modules.values(), (H, kv), strict=True))
    assert layer_of(reading).qk_norm == kind
    assert_statistics(reading, *captured(mixer), causal=True)
    assert_spectrum(reading, weights.q * g_q[..., None], weights.k * g_k[..., None])
    peak_k = g_k.abs().amax(-1).repeat_interleave(H // kv)
    assert_bound(reading, D**-0.5 * D * g_q.abs().amax(-1) * peak_k)


def test_gains_that_are_views_of_a_flat_parameter() -> None:
    """As FullyShardedDataParallel makes them for the forward: no leaves, and so refused by a deep copy of the norm."""
    modules = {name: perturbed(UnitOffsetRMSNorm(D)) for name in ("q_norm", "k_norm")}
    flat = nn.Parameter(torch.cat([module.weight.detach() for module in modules.values()]))
    for module, view in zip(modules.values(), flat.split(D), strict=True):
        del module.weight
        module.weight = view
    weights = parts()
    reading = sampled(Model(Mixer(weights, causal, normed, modules)), tokens())
    assert reading.problems == ()
    assert layer_of(reading).qk_norm == "rms per head"
    g_q, g_k = (1 + module.weight.detach()[:, None] for module in modules.values())
    assert_spectrum(reading, weights.q * g_q, weights.k * g_k)


def test_norms_before_heads_are_moved() -> None:
    modules = {"q_norm": perturbed(nn.RMSNorm(D)), "k_norm": perturbed(nn.RMSNorm(D))}
    weights = parts()
    reading = sampled(Model(Mixer(weights, causal, normed_per_token, modules)), tokens())
    g_q, g_k = (m.weight.detach() for m in modules.values())
    assert_spectrum(reading, weights.q * g_q[..., None], weights.k * g_k[..., None])
    assert_bound(reading, D**0.5 * g_q.max() * g_k.max())


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize(("make", "kind"), [(nn.RMSNorm, "rms"), (nn.LayerNorm, "layer")])
@pytest.mark.parametrize("kv", [H, 2])
def test_norms_across_heads(make: Any, kind: str, kv: int, start: bool) -> None:
    """One norm over all heads' features: scale * d * sqrt(H * Hk) * max|gain_q| * max|gain_k|."""
    modules = {"q_norm": make(H * D), "k_norm": make(kv * D)}
    if not start:
        modules = {key: perturbed(module, "weight") for key, module in modules.items()}
    weights = parts(kv, bias=True)
    mixer = Mixer(weights, causal, normed_across, modules)
    reading = sampled(Model(mixer), tokens())
    g_q, g_k = (m.weight.detach().unflatten(0, (-1, D)) for m in modules.values())
    assert layer_of(reading).qk_norm == f"{kind} across heads"
    assert_statistics(reading, *captured(mixer), causal=True)
    assert_spectrum(reading, weights.q * g_q[..., None], weights.k * g_k[..., None])
    assert_bound(reading, D**-0.5 * D * (H * kv) ** 0.5 * g_q.max() * g_k.max())


def by_normalize(q: Tensor, k: Tensor) -> Heads:
    return F.normalize(q, dim=-1), F.normalize(k, p=2, dim=-1), k


def by_division(q: Tensor, k: Tensor) -> Heads:
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6), k


def on_logits(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * g).softmax(-1) @ v


def on_queries(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * g, k, v, scale=1.0)


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("norm", [by_normalize, by_division])
@pytest.mark.parametrize("call", [on_logits, on_queries])
@pytest.mark.parametrize("g", [torch.tensor(7.0), torch.tensor([1.0, 2, 4, 8])[:, None, None]], ids=["one", "a head"])
def test_unit_vectors_and_a_learned_scale(g: Tensor, call: Any, norm: Any, rotation: bool) -> None:
    """The bound is the scale g, of the model or of the head, wherever it is multiplied in."""
    g = nn.Parameter(g)
    weights = parts(bias=True)

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = separate(layer, x)
        q, k, _ = norm(q, k)
        return (turned(q), turned(k), v) if rotation else (q, k, v)

    mixer = Mixer(weights, lambda q, k, v: call(g, q, k, v), split)
    reading = sampled(Model(mixer), tokens())
    assert layer_of(reading).qk_norm == "l2 per head"
    q, k = captured(mixer)
    assert_statistics(reading, q * g.detach(), k, scale=1.0)
    assert_spectrum(reading, weights.q, weights.k)
    assert_bound(reading, g.flatten())


def turned(x: Tensor) -> Tensor:
    """Rotary embedding, half-split."""
    angle = torch.arange(x.shape[-2])[:, None] * 0.7 ** torch.arange(D // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_functional_norms_without_gain() -> None:
    """`F.rms_norm` inside the forward, as in trainers that drop the gain."""

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = separate(layer, x)
        return F.rms_norm(q, (D,)), F.rms_norm(k, (D,)), v

    weights = parts()
    reading = sampled(Model(Mixer(weights, causal, split)), tokens())
    assert layer_of(reading).qk_norm == "rms per head"
    assert_spectrum(reading, weights.q, weights.k)
    assert_bound(reading, torch.tensor(D**0.5))


def test_a_norm_of_the_input_is_no_query_key_norm() -> None:
    """A layer that normalises what it is given, and not its queries."""

    def split(layer: Any, x: Tensor) -> Heads:
        return separate(layer, layer.norm(x))

    norm = perturbed(nn.LayerNorm(E))
    weights = parts(kv=2, bias=True)
    reading = sampled(Model(Mixer(weights, causal, split, {"norm": norm})), tokens())
    assert layer_of(reading).qk_norm == ""
    assert_spectrum(reading, weights.q, weights.k)
    assert np.isnan(values_of(reading)["logit_bound"]).all()
    q, k, _ = weights.project(norm(tokens()).detach())
    assert_statistics(reading, q, k, causal=True)


def test_many_norms_in_one_layer() -> None:
    """Of the input, of queries, keys and values, all of one kind and one width: told apart by the vectors they make."""

    def split(layer: Any, x: Tensor) -> Heads:
        x = layer.norm(x)
        q, k, v = layer.q_norm(layer.q_proj(x)), layer.k_norm(layer.k_proj(x)), layer.v_norm(layer.v_proj(x))
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        return q, k, v

    modules = {name: perturbed(nn.RMSNorm(E)) for name in ("norm", "q_norm", "k_norm", "v_norm")}
    weights = parts()
    model = Model(Mixer(weights, causal, split, modules)).train()
    probe = Probe(model, rows=None)
    reading = [step(probe, model, tokens()) for _ in range(2)][-1]
    assert not probe.due
    g_q, g_k = (modules[name].weight.detach().unflatten(0, (H, D)) for name in ("q_norm", "k_norm"))
    assert layer_of(reading).qk_norm == "rms across heads"
    assert_spectrum(reading, weights.q * g_q[..., None], weights.k * g_k[..., None])
    assert_bound(reading, D**0.5 * H * g_q.max() * g_k.max())


def test_a_norm_of_the_input_and_many_possible_layouts() -> None:
    """Many heads, keys repeated by the model: the right one is found among all that could be."""
    heads, kv, d = 16, 4, 2

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = perturbed(nn.LayerNorm(heads * d), "weight")
            self.to_qkv = nn.Linear(heads * d, (heads + 2 * kv) * d, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.to_qkv(self.norm(x)).split((heads * d, kv * d, kv * d), -1)
            q, k, v = (y.unflatten(-1, (-1, d)).transpose(1, 2) for y in (q, k, v))
            k, v = (y.repeat_interleave(heads // kv, dim=1) for y in (k, v))
            return causal(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model = Wide()
    reading = sampled(model, tokens(B, T, heads * d))
    w_q, w_k, _ = model.to_qkv.weight.detach().unflatten(0, (-1, d)).split((heads, kv, kv))
    assert_spectrum(reading, w_q, w_k, "Wide")
    assert layer_of(reading, "Wide").kv_heads == kv


def test_queries_alone_are_normed() -> None:
    """No bound without a norm on both sides, and the layer says so."""

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = separate(layer, x)
        return layer.q_norm(q), k, v

    norm = perturbed(nn.RMSNorm(D))
    weights = parts()
    reading = sampled(Model(Mixer(weights, causal, split, {"q_norm": norm})), tokens())
    assert layer_of(reading).qk_norm == "rms per head / none"
    assert_spectrum(reading, weights.q * norm.weight.detach()[..., None], weights.k)
    assert np.isnan(values_of(reading)["logit_bound"]).all()


def test_fused_projection_with_norms() -> None:
    """[q; k; v] and a norm each, heads split by unbind."""

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = layer.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return layer.q_norm(q), layer.k_norm(k), v

    weights = parts()
    rows = torch.cat([w.flatten(0, 1) for w in weights[:3]])
    modules = {"qkv": linear(rows), "q_norm": perturbed(nn.LayerNorm(D)), "k_norm": perturbed(nn.LayerNorm(D))}
    reading = sampled(Model(Mixer(weights, causal, split, modules)), tokens())
    g_q, g_k = (modules[name].weight.detach() for name in ("q_norm", "k_norm"))
    assert_spectrum(reading, weights.q * g_q[..., None], weights.k * g_k[..., None])
    assert_bound(reading, D**0.5 * g_q.max() * g_k.max())


def test_heads_in_an_unknown_order_are_not_proved_by_a_norm() -> None:
    """After a norm all lengths are equal: that proves nothing."""

    def split(layer: Any, x: Tensor) -> Heads:
        q, k, v = normed(layer, x)
        return turned(q.flip(1)), turned(k), v

    modules = {"q_norm": nn.RMSNorm(D), "k_norm": nn.RMSNorm(D)}
    layer = layer_of(sampled(Model(Mixer(parts(), causal, split, modules)), tokens()))
    assert layer.state == "logits_only"
    assert "makes q" in layer.note
