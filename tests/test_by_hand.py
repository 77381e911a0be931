"""Attention written out: every product, mask and softmax that code uses, seen as the same attention."""

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
    Mixer,
    Model,
    Parts,
    T,
    assert_spectrum,
    assert_statistics,
    layer_of,
    linear,
    parts,
    sampled,
    tokens,
    values_of,
)
from torch import Tensor, nn

SCALE = D**-0.5
CAUSAL = torch.ones(T, T).tril().bool()
LOWEST = torch.finfo(torch.float32).min
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def check(call: Call, weights: Parts | None = None, **expected: Any) -> None:
    """The written-out attention has the maps of q and k, and its weights are proved."""
    weights = weights or parts(bias=True)
    reading = sampled(Model(Mixer(weights, call)), tokens())
    q, k, _ = weights.project(tokens())
    assert not reading.problems
    assert_statistics(reading, q, k, **expected)
    assert_spectrum(reading, weights.q, weights.k)
    assert [layer.name for layer in reading.layers] == ["mix"]


def by_matmul(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) * SCALE


def by_operator(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / D**0.5


def by_scaled_queries(q: Tensor, k: Tensor) -> Tensor:
    return (q * SCALE) @ k.permute(0, 1, 3, 2)


def by_bmm(q: Tensor, k: Tensor) -> Tensor:
    return (torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * SCALE).unflatten(0, (-1, H))


def by_baddbmm(q: Tensor, k: Tensor) -> Tensor:
    empty = torch.zeros(1, T, T)
    return torch.baddbmm(empty, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=SCALE).view(-1, H, T, T)


def by_baddbmm_method(q: Tensor, k: Tensor) -> Tensor:
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    return torch.zeros(1, 1, T).baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=SCALE).view(-1, H, T, T)


def by_einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd->bhij", q, k) * SCALE


def by_einsum_of_positions(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("nqhd, nkhd -> nhqk", q.transpose(1, 2), k.transpose(1, 2)) * SCALE


def by_einsum_sequence_first(q: Tensor, k: Tensor) -> Tensor:
    q, k = (x.permute(2, 0, 1, 3) for x in (q, k))
    return torch.einsum("ibhd,jbhd->bhij", [q, k]) * SCALE


def by_einsum_with_dots(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("...id,...jd->...ij", q, k) * SCALE


SCORES = [
    by_matmul,
    by_operator,
    by_scaled_queries,
    by_bmm,
    by_baddbmm,
    by_baddbmm_method,
    by_einsum,
    by_einsum_of_positions,
    by_einsum_sequence_first,
    by_einsum_with_dots,
]


@pytest.mark.parametrize("scores", SCORES)
def test_products(scores: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Queries times keys by any function, in any order of dimensions."""
    check(lambda q, k, v: scores(q, k).softmax(-1) @ v)


def test_softmax_on_folded_heads() -> None:
    """bmm, softmax and bmm without ever separating heads from sequences."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        s = torch.bmm(q, k.mT) * SCALE
        s = s + torch.zeros(T, T).masked_fill(~CAUSAL, -torch.inf)
        return torch.bmm(F.softmax(s, dim=-1), v).unflatten(0, (-1, H))

    check(call, causal=True)


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda s: s.softmax(dim=-1),
    "function": lambda s: F.softmax(s, -1),
    "torch": lambda s: torch.softmax(s, dim=3),
    "in float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "module": nn.Softmax(dim=-1),
    "with dropout": lambda s: F.dropout(s.softmax(-1), 0.5),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes(name: str) -> None:
    check(lambda q, k, v: SOFTMAXES[name](by_matmul(q, k)) @ v)


def set_items(s: Tensor) -> Tensor:
    s = s.clone()
    s[:, :, ~CAUSAL] = -torch.inf
    return s


HIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "filled with -inf": lambda s: s.masked_fill(~CAUSAL, -torch.inf),
    "filled with -1e9": lambda s: s.masked_fill(CAUSAL[None, None] == 0, -1e9),
    "filled with the lowest": lambda s: s.masked_fill(~CAUSAL, LOWEST),
    "filled with -1e4": lambda s: s.masked_fill(~CAUSAL.expand(B, 1, T, T), -1e4),
    "filled in place": lambda s: s.masked_fill_(~CAUSAL, value=-1e4),
    "torch.where": lambda s: torch.where(CAUSAL, s, torch.full([], LOWEST)),
    "torch.where of a number": lambda s: torch.where(~CAUSAL, -1e4, s),
    "the method where": lambda s: s.where(CAUSAL, -1e4),
    "torch.where of their shape": lambda s: torch.where(~CAUSAL, torch.full_like(s, -1e4), s),
    "added -inf": lambda s: s + torch.zeros(T, T).masked_fill(~CAUSAL, -torch.inf),
    "added -1e4": lambda s: s + (1 - CAUSAL.float())[None, None] * -1e4,
    "added first": lambda s: (1 - CAUSAL.float()) * -1e4 + s,
    "added in place": lambda s: s.add_((1 - CAUSAL.float()) * -1e4),
    "subtracted": lambda s: s - 1e4 * (1 - CAUSAL.float()),
    "set": set_items,
}


@pytest.mark.parametrize("name", HIDE)
def test_masks(name: str) -> None:
    """What a mask hides is not counted, however it is written; logits and masks of folded heads alike."""
    check(lambda q, k, v: HIDE[name](by_matmul(q, k)).softmax(-1) @ v, causal=True)
    check(lambda q, k, v: HIDE[name](by_bmm(q, k)).softmax(-1) @ v, causal=True)


def test_two_masks() -> None:
    """Causal by one operation, padding by another, before and after the heads are separated."""
    padded = torch.arange(T) >= torch.tensor([0, 2, 5])[:, None]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul_(SCALE)
        s = s.masked_fill(~padded.repeat_interleave(H, 0)[:, None], -1e4).view(B, H, T, T)
        return s.masked_fill(~CAUSAL, -1e4).softmax(-1) @ v

    check(call, mask=padded[:, None, None] & CAUSAL)


def test_a_learned_bias_and_a_soft_cap() -> None:
    """They are in the logits, and are no masks."""
    bias = nn.Parameter(torch.randn(H, T, T, generator=torch.Generator().manual_seed(4)) * 4)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (20 * torch.tanh(by_matmul(q, k) / 20) + bias).softmax(-1) @ v

    check(call, bias=bias.detach(), softcap=20.0)


def grouped_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (k.shape[1], -1))
    return ((q @ k.unsqueeze(2).mT * SCALE).masked_fill(~CAUSAL, -1e4).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (k.shape[1], -1))
    p = (torch.einsum("bhgid,bhjd->bhgij", q, k) * SCALE).masked_fill(~CAUSAL[None, None, None], -1e4).softmax(-1)
    return torch.einsum("bhgij,bhjd->bhgid", p, v).flatten(1, 2)


def groups_first_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (k.shape[1], -1)).transpose(1, 2)
    p = (torch.einsum("bghid,bhjd->bghij", q, k) * SCALE).masked_fill(~CAUSAL, -1e4).softmax(-1)
    return torch.einsum("bghij,bhjd->bghid", p, v).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("call", [grouped_matmul, grouped_einsum, groups_first_einsum])
def test_groups_as_a_dimension(call: Call, kv: int) -> None:
    """Five dimensions, key heads before or after the queries that share them."""
    check(call, parts(kv), causal=True)


def test_one_key_head_in_einsum() -> None:
    """Multi-query attention: keys without a dimension of heads."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * SCALE).softmax(-1)
        return torch.einsum("bhij,bjd->bhid", p, v[:, 0])

    check(call, parts(kv=1))


class Windows(nn.Module):
    """Window attention as in Swin: windows join the batch, and shifted windows have masks of their own."""

    def __init__(self, weights: Parts, mask: Tensor) -> None:
        super().__init__()
        self.qkv = linear(torch.cat([w.flatten(0, 1) for w in weights[:3]]))
        self.mask = mask  # bool [windows, T, T]

    def forward(self, x: Tensor) -> Tensor:
        batch, windows = len(x), len(self.mask)
        x = x.unflatten(1, (windows, T)).flatten(0, 1)
        q, k, v = self.qkv(x).view(-1, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        s = (q * SCALE @ k.transpose(-2, -1)).view(batch, windows, H, T, T)
        s = s + torch.zeros(self.mask.shape).masked_fill(~self.mask, -100.0)[:, None]
        s = s.masked_fill(~self.mask[None, :, None], -1e4).view(-1, H, T, T)
        return (s.softmax(-1) @ v).transpose(1, 2).reshape(batch, windows * T, E)


def test_windows() -> None:
    """Every window is a sequence of its own, with its own mask."""
    weights = parts()
    mask = CAUSAL | (torch.rand(4, T, T, generator=torch.Generator().manual_seed(2)) < 0.5)
    x = tokens(2, 4 * T, E)
    reading = sampled(Model(Windows(weights, mask)), x)
    q, k, _ = weights.project(x.reshape(8, T, E))
    assert_statistics(reading, q, k, mask=mask.repeat(2, 1, 1)[:, None])
    assert_spectrum(reading, weights.q, weights.k)


class Loop(nn.Module):
    """One head after another; `alone`: each with projections of its own, in a module of its own."""

    def __init__(self, weights: Parts, alone: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(weights, h) for h in range(H)]) if alone else None
        if not alone:
            self.query, self.key, self.value = (linear(w.flatten(0, 1)) for w in weights[:3])

    def forward(self, x: Tensor) -> Tensor:
        if self.heads is not None:
            return torch.cat([head(x) for head in self.heads], -1)
        q, k, v = (p(x).split(D, -1) for p in (self.query, self.key, self.value))
        return torch.cat([attend(*qkv) for qkv in zip(q, k, v, strict=True)], -1)


class Head(nn.Module):
    def __init__(self, weights: Parts, h: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(w[h]) for w in weights[:3])

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.query(x), self.key(x), self.value(x))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("alone", [True, False])
def test_a_loop_over_heads(alone: bool) -> None:
    """Every head is a layer of one head, by the module's name or by the order of its calls."""
    weights = parts()
    reading = sampled(Model(Loop(weights, alone)), tokens())
    q, k, _ = weights.project(tokens())
    names = [f"mix.heads.{h}" for h in range(H)] if alone else ["mix", "mix#1", "mix#2", "mix#3"]
    assert [layer.name for layer in reading.layers] == names
    for h, name in enumerate(names):
        assert_statistics(reading, q[:, h : h + 1], k[:, h : h + 1], name, causal=True)
        assert_spectrum(reading, weights.q[h : h + 1], weights.k[h : h + 1], name)


class Experts(nn.Module):
    """Attention, a router over experts, and a classifier, all in one module with as many experts as features."""

    def __init__(self, weights: Parts) -> None:
        super().__init__()
        self.q, self.k, self.v = (linear(w.flatten(0, 1)) for w in weights[:3])
        self.gate, self.up, self.classes = nn.Linear(E, E), nn.Parameter(torch.ones(E, E)), nn.Linear(E, T)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x) for p in (self.q, self.k, self.v))  # one head
        x = x + (q @ k.mT * E**-0.5).softmax(-1) @ v
        x = x + self.gate(x).softmax(-1) * (x @ self.up)
        return x * self.classes(x).softmax(-1).sum(-1, keepdim=True)


def test_a_router_and_a_classifier_are_no_attention() -> None:
    """A softmax over experts or classes has the shapes of attention, and no product of two activations behind it."""
    weights = parts()
    reading = sampled(Model(Experts(weights)), tokens())
    assert [layer.name for layer in reading.layers] == ["mix"]
    whole = Parts(*(w.reshape(1, E, E) for w in weights[:3]), torch.zeros(1, E), torch.zeros(1, E))
    q, k, _ = whole.project(tokens())
    assert_statistics(reading, q, k)
    assert_spectrum(reading, whole.q, whole.k)


def test_tensors_overwritten_after_the_call() -> None:
    """What a model does to its tensors afterwards does not reach the numbers."""
    weights = parts()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = by_matmul(q, k)
        with torch.no_grad():
            p = s.softmax(-1)
            s.zero_()
        return p @ v

    reading = sampled(Model(Mixer(weights, call)), tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k)
    np_max = values_of(reading)["query_norm_max"]
    torch.testing.assert_close(torch.tensor(np_max).double(), q.norm(dim=-1).amax((0, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("cross", [5, 14, 8])
def test_folded_heads_with_keys_of_another_length(cross: int) -> None:
    """Sequences are told from heads by both projections, whatever the lengths."""
    weights = parts()
    memory = tokens(2, cross, E, seed=5)

    def split(layer: Any, x: Tensor) -> Any:
        pairs = ((layer.k_proj, memory), (layer.q_proj, x), (layer.v_proj, memory))
        k, q, v = (p(a).unflatten(-1, (-1, D)).transpose(1, 2) for p, a in pairs)
        return q, k, v

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return ((q @ k.mT * SCALE).softmax(-1) @ v).unflatten(0, (2, H))

    x = tokens(2, 4, E)
    reading = sampled(Model(Mixer(weights, call, split)), x)
    q, k, _ = weights.project(x, memory)
    assert layer_of(reading).heads == H
    assert_statistics(reading, q, k)
    assert_spectrum(reading, weights.q, weights.k)
