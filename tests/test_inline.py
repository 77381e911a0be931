"""Attention written straight into a block, beside its norms and its feed-forward layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models import sampled
from torch import Tensor, nn

WIDTH, HEADS = 384, 6


class Block(nn.Module):
    """normed: the queries and keys of all heads together are normed too."""

    def __init__(self, normed: bool):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.of_q, self.of_k = (nn.LayerNorm(WIDTH) if normed else nn.Identity() for _ in "qk")
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        y = self.before(x)
        k, v = self.kv(y).chunk(2, -1)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.of_q(self.q(y)), self.of_k(k), v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.up(self.between(x))


@pytest.mark.parametrize("normed", [False, True])
def test_a_norm_of_the_input_is_no_query_key_norm(normed: bool) -> None:
    """At initialisation queries are nearly normed by themselves, so that the block's first norm, taken of them, changes
    them by less than 1 %: near enough to pass for a query-key norm, with a bound that nothing keeps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(normed) for _ in range(4)))
    layers = sampled(model, torch.randn(1, 64, WIDTH)).layers
    assert [layer.state for layer in layers] == ["verified"] * 4
    assert {layer.qk_norm for layer in layers} == {"layer across heads" if normed else ""}
    assert [layer.bound is not None for layer in layers] == [normed] * 4
