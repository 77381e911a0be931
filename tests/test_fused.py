"""`F.scaled_dot_product_attention` in every form of its arguments, seen in models that train."""

from __future__ import annotations

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
    T,
    assert_spectrum,
    assert_statistics,
    layer_of,
    parts,
    sampled,
    tokens,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GENERATOR = torch.Generator().manual_seed(3)
CAUSAL = torch.ones(T, T).tril().bool()
RIGHT = torch.rand(B, H, T, T, generator=GENERATOR) < 0.7
PADDED = torch.arange(T) >= torch.tensor([0, 2, 5])[:, None, None, None]  # [B, 1, 1, T], left padding
BIAS = torch.randn(B, H, T, T, generator=GENERATOR)
MASKS = {
    "square": CAUSAL,
    "of everything": RIGHT | CAUSAL,
    "padding": PADDED,
    "padding and causal": PADDED & CAUSAL,
    "a bias": BIAS,
    "a bias that hides": BIAS.masked_fill(~CAUSAL, -torch.inf),
    "hidden by the lowest number": torch.zeros(T, T).masked_fill(~CAUSAL, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"is_causal": True}, {"causal": True}),
        ({"scale": 0.7}, {"scale": 0.7}),
        *(({"attn_mask": mask}, {"mask": mask}) for mask in MASKS.values()),
        ({"attn_mask": CAUSAL, "scale": 0.2, "dropout_p": 0.5}, {"mask": CAUSAL, "scale": 0.2}),
    ],
    ids=["plain", "causal", "scale", *MASKS, "dropout"],
)
def test_arguments(options: dict[str, Any], expected: dict[str, Any]) -> None:
    """Scale, causality and masks of any shape mean what torch means by them."""
    weights = parts(bias=True)
    model = Model(Mixer(weights, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)))
    reading = sampled(model, tokens())
    q, k, _ = weights.project(tokens())
    assert not reading.problems
    assert_statistics(reading, q, k, **expected)
    assert_spectrum(reading, weights.q, weights.k)


def test_positional_arguments_and_an_imported_name() -> None:
    """`from torch.nn.functional import ...` before watching is seen, and so are arguments without names."""
    weights = parts()
    model = Model(Mixer(weights, lambda q, k, v: scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5)))
    q, k, _ = weights.project(tokens())
    assert_statistics(sampled(model, tokens()), q, k, causal=True, scale=0.5)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(H // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, H // x.shape[1], -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("kv", [2, 1])
@pytest.mark.parametrize("call", [repeated, expanded, native])
def test_grouped_queries(call: Any, kv: int) -> None:
    """Fewer key heads than query heads, whether torch or the model repeats them; one spectrum a query head."""
    weights = parts(kv, bias=True)
    reading = sampled(Model(Mixer(weights, call)), tokens())
    q, k, _ = weights.project(tokens())
    layer = layer_of(reading)
    assert (layer.heads, layer.kv_heads, layer.head_dim) == (H, kv, D)
    assert_statistics(reading, q, k, causal=True)
    assert_spectrum(reading, weights.q, weights.k)


def test_one_key_head_broadcast() -> None:
    """Multi-query attention that leaves the repetition to broadcasting."""
    weights = parts(kv=1)
    reading = sampled(Model(Mixer(weights, F.scaled_dot_product_attention)), tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k)
    assert_spectrum(reading, weights.q, weights.k)


@pytest.mark.parametrize("mask", [None, CAUSAL, (RIGHT | CAUSAL).flatten(0, 1), BIAS.flatten(0, 1)])
def test_sequences_and_heads_folded(mask: Tensor | None) -> None:
    """Three dimensions, sequences * heads: the projections tell how many sequences there are."""

    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).unflatten(0, (-1, H))

    weights = parts()
    reading = sampled(Model(Mixer(weights, folded)), tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k, mask=mask if mask is None or mask.dim() == 2 else mask.unflatten(0, (B, H)))
    assert_spectrum(reading, weights.q, weights.k)


@pytest.mark.parametrize("mask", [None, RIGHT[:, :, :1] | CAUSAL])
def test_groups_as_a_dimension(mask: Tensor | None) -> None:
    """Five dimensions `[B, Hk, group, T, d]`, keys `[B, Hk, 1, T, d]`."""

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        over = None if mask is None else mask.unflatten(1, (2, -1))
        q = q.unflatten(1, (2, -1))
        return F.scaled_dot_product_attention(q, k.unsqueeze(2), v.unsqueeze(2), attn_mask=over).flatten(1, 2)

    weights = parts(kv=2)
    reading = sampled(Model(Mixer(weights, grouped)), tokens())
    q, k, _ = weights.project(tokens())
    assert_statistics(reading, q, k, mask=mask)
    assert_spectrum(reading, weights.q, weights.k)


def test_windows_as_a_dimension() -> None:
    """Five dimensions `[B, windows, H, T, d]`: every window is a sequence of its own."""
    weights = parts()
    x = tokens(2, 3 * T, E)

    def split(layer: Any, x: Tensor) -> Any:
        return [
            p(x).unflatten(1, (3, T)).unflatten(-1, (H, D)).transpose(2, 3)
            for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        ]

    def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2, 3)

    reading = sampled(Model(Mixer(weights, windows, split)), x)
    q, k, _ = weights.project(x.reshape(6, T, E))
    assert_statistics(reading, q, k)
    assert_spectrum(reading, weights.q, weights.k)
