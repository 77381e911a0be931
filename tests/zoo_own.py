"""Models of our own for attention that no library here has: flex_attention with functions, two streams of tokens,
nanoGPT-like code, and attention that has no softmax to see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests import zoo
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnwatch

E, H, D = 32, 4, 8
Heads = tuple[Tensor, Tensor, Tensor]


def heads_of(x: Tensor) -> Tensor:
    """`[B, T, n * D]` to `[B, n, T, D]`."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Flex(nn.Module):
    """Grouped queries, a learned slope a head as score_mod, causal documents as block mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(E, E), nn.Linear(E, E // 2), nn.Linear(E, E // 2)
        self.slopes = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - self.slopes[h] * (i - j).abs()

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (documents[b, i] == documents[b, j])

        mask = create_block_mask(visible, len(x), None, x.shape[1], x.shape[1], device="cpu")
        q, k, v = heads_of(self.q_proj(x)), heads_of(self.k_proj(x)), heads_of(self.v_proj(x))
        return joined(flex_attention(q, k, v, score_mod=bias, block_mask=mask, enable_gqa=True))


class Joint(nn.Module):
    """One attention over two streams of tokens, each with its own projections and RMSNorms on q and k, as in MM-DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_text, self.qkv_image = nn.Linear(E, 3 * E), nn.Linear(E, 3 * E)
        for name in ("q_text", "k_text", "q_image", "k_image"):
            setattr(self, f"norm_{name}", nn.RMSNorm(D))

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        q, k, v = (
            torch.cat(pair, 2) for pair in zip(self.split(text, "text"), self.split(image, "image"), strict=True)
        )
        return joined(F.scaled_dot_product_attention(q, k, v))

    def split(self, x: Tensor, stream: str) -> Heads:
        q, k, v = (heads_of(part) for part in getattr(self, f"qkv_{stream}")(x).chunk(3, -1))
        return getattr(self, f"norm_q_{stream}")(q), getattr(self, f"norm_k_{stream}")(k), v


class NanoGPT(nn.Module):
    """The attention of nanoGPT: one fused projection, a causal mask as a buffer, softmax by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(E, dim=2)
        q, k, v = (part.view(batch, length, H, width // H).transpose(1, 2) for part in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return out


class Kernel(nn.Module):
    """Attention by another function of the logits than a softmax; `told`: it calls attnwatch.observe."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor], told: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, E)
        self.mix, self.told = mix, told

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.q_proj(x)), heads_of(self.k_proj(x)), heads_of(self.v_proj(x))
        if self.told:
            attnwatch.observe(self, q, k, causal=True)
        return joined(self.mix(q, k, v))


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, not causal: no map is ever formed."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * D**-0.5 - math.log(k.shape[-2])) @ v


def by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal softmax that does not call one."""
    weights = torch.exp(q @ k.mT * D**-0.5).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


class Model(nn.Module):
    """A layer inside a residual block, a norm and a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 11)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        y = self.attention(x, *more)
        out: Tensor = self.head(self.norm(y + (x if y.shape == x.shape else 0)))
        return out


def made(attention: nn.Module) -> nn.Module:
    return zoo.drawn(Model(attention))


def tokens(length: int = 12, seed: int = 5) -> Tensor:
    return torch.randn(2, length, E, generator=torch.Generator().manual_seed(seed))


def documents() -> Tensor:
    """Two packed sequences of 12 positions."""
    return torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 4 + [2] * 6])


def models() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Tensor, ...]]]:
    """Name, builder and inputs of each."""
    yield "flex_attention with score_mod and block mask", lambda: made(Flex()), (tokens(), documents())
    yield "joint attention over two streams", lambda: made(Joint()), (tokens(7, seed=6), tokens())
    yield "joint attention over two streams, equally long", lambda: made(Joint()), (tokens(seed=6), tokens())
    yield "nanoGPT", lambda: made(NanoGPT()), (tokens(),)
    for mix in (linear, sigmoid, by_exponentials):
        name = mix.__name__.replace("_", " ")
        yield f"{name} attention", partial(lambda m: made(Kernel(m)), mix), (tokens(),)
        yield (
            f"{name} attention, with attnwatch.observe",
            partial(lambda m: made(Kernel(m, told=True)), mix),
            (tokens(),),
        )
