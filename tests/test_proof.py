"""Proofs: a choice of weights is followed from sample to sample, and nothing is claimed that is not proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import (
    H,
    Heads,
    Mixer,
    Model,
    T,
    assert_spectrum,
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
from torch import Tensor

from attnwatch.hooks.probe import Probe


def innermost(layer: Any, x: Tensor) -> Heads:
    """[h][d][q k v]: not the first layout that is tried."""
    q, k, v = layer.to_qkv(x).view(*x.shape[:2], H, -1, 3).transpose(1, 2).unbind(-1)
    return q, k, v


def test_queries_and_keys_that_start_equal() -> None:
    """W_q = W_k at the start: the names say which is which, and the next sample finds the one that moved."""
    same = parts()._replace(k=parts().q)
    model = Model(Mixer(same)).train()
    probe = Probe(model, rows=None)
    assert_spectrum(step(probe, model, tokens()), parts().q, parts().q)
    with torch.no_grad():
        model.mix.k_proj.weight.copy_(parts(seed=3).k.flatten(0, 1))
    assert_spectrum(step(probe, model, tokens()), parts().q, parts(seed=3).k)


def test_spectra_follow_the_weights() -> None:
    """A layout once proved is looked at first, and proved again each time."""
    packed = linear(torch.stack(parts()[:3], 2).flatten(0, 2))
    model = Model(Mixer(parts(), causal, innermost, {"to_qkv": packed})).train()
    probe = Probe(model, rows=None)
    step(probe, model, tokens())
    step(probe, model, tokens())
    moved = parts(seed=9)
    with torch.no_grad():
        model.mix.to_qkv.weight.copy_(torch.stack(moved[:3], 2).flatten(0, 2))
    assert_spectrum(step(probe, model, tokens()), moved.q, moved.k)


def swapped_heads(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return q.flip(1), k, v


def swapped_keys(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return q, k.roll(1, dims=1), v


def mixed_heads(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return torch.einsum("bhtd,hg->bgtd", q, torch.linspace(-1, 1, H * H).view(H, H)), k, v


def nonlinear(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return q, F.elu(k) + 1, v


def shifted_in_time(layer: Any, x: Tensor) -> Heads:
    q, k, v = separate(layer, x)
    return q, k.roll(1, dims=2), v


def silent_first_position(layer: Any, x: Tensor) -> Heads:
    q, k, v = swapped_heads(layer, x)
    return q * (torch.arange(T) > 0)[:, None], k, v


@pytest.mark.parametrize(
    "split", [swapped_heads, swapped_keys, mixed_heads, nonlinear, shifted_in_time, silent_first_position]
)
@pytest.mark.parametrize("kv", [H, 2])
def test_what_is_not_proved_is_not_claimed(split: Callable[[Any, Tensor], Heads], kv: int) -> None:
    """Heads in an order nobody knows, vectors made otherwise: maps are right, spectra are absent, and it says so."""
    weights = parts(kv)
    reading = sampled(Model(Mixer(weights, causal, split)), tokens())
    layer, values = layer_of(reading), values_of(reading)
    assert layer.state == "logits_only"
    assert layer.note.startswith("no projection and layout makes ")
    assert torch.tensor(values["qk_rank"]).isnan().all()
    assert not torch.tensor(values["entropy"]).isnan().any()
