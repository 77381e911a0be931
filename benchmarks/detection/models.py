"""The models of the recipes: small transformers that differ in how they attend and how their weights begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from benchmarks.detection.data import START, Batch
from benchmarks.detection.recipe import Recipe
from torch import Tensor, nn

CLASSES = {"digits_4": 10, "digits_2": 10, "digits_1": 10}
PATCH = {"digits_4": 4, "digits_2": 2, "digits_1": 1}
SEE_ALL = (*PATCH, "maximum", "reverse")
"""Sources whose queries see every key."""


class Attention(nn.Module):
    """Self-attention with every choice that a recipe has."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        width, self.heads, self.call = recipe.width, recipe.heads, recipe.call
        self.kv_heads, self.position = recipe.kv_heads or recipe.heads, recipe.position
        kv = width // recipe.heads * self.kv_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (matrix(width, n) for n in (width, kv, kv, width))
        size = width if recipe.norm == "rms_across" else width // recipe.heads
        self.across = recipe.norm == "rms_across"
        self.q_norm, self.k_norm = (_norm(recipe.norm, size) for _ in range(2))
        # Henry et al. 2020, arXiv:2010.04245: log2(n * n - n), n the length of the sequence.
        g = torch.tensor(float(recipe.length**2 - recipe.length)).log2()
        self.g = nn.Parameter(g) if recipe.norm == "l2" else None

    def forward(self, x: Tensor, seen: Tensor | None, causal: bool) -> Tensor:  # [B, T, width]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        size = q.shape[-1] // self.heads
        q, k, v = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y in (q, k, v))
        if not self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.position == "rope":
            q, k = rotated(q), rotated(k)
        scale = q.shape[-1] ** -0.5
        if self.g is not None:
            q, scale = q * self.g, 1.0
        if self.call == "sdpa":
            y = F.scaled_dot_product_attention(
                q, k, v, seen, is_causal=causal and seen is None, scale=scale, enable_gqa=self.kv_heads < self.heads
            )
        else:
            y = self._by_hand(q, k, v, seen, causal, scale)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return out

    def _by_hand(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scale: float) -> Tensor:
        if self.call == "half":  # the products overflow beyond 65,504, before they are scaled
            q, k = q.half(), k.half()
        scores = q @ k.transpose(-2, -1) * scale
        if seen is None and causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.float().softmax(-1) @ v


def rotated(x: Tensor) -> Tensor:  # [B, H, T, size], rotary positions of base 100
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def slopes(heads: int, length: int) -> Tensor:
    """`[H, T, T]`: what ALiBi adds to the logits, with the causal mask."""
    place = torch.arange(length)
    distance = (place[None, :] - place[:, None]).float().masked_fill(place[None, :] > place[:, None], -torch.inf)
    return distance * 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)[:, None, None]


class Unit(nn.Module):
    """To length 1 along the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def _norm(kind: str, size: int) -> nn.Module:
    make: dict[str, Callable[[], nn.Module]] = {
        "": nn.Identity,
        "l2": Unit,
        "rms": lambda: nn.RMSNorm(size, eps=1e-6),
        "rms_across": lambda: nn.RMSNorm(size, eps=1e-6),
        "layer": lambda: nn.LayerNorm(size),
    }
    return make[kind]()


class Torchs(nn.Module):
    """torch's own nn.MultiheadAttention behind the same call."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.inner = nn.MultiheadAttention(recipe.width, recipe.heads, bias=False, batch_first=True)
        for weight in (self.inner.in_proj_weight, self.inner.out_proj.weight):
            nn.init.normal_(weight, std=recipe.width**-0.5)

    def forward(self, x: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
        out: Tensor = self.inner(x, x, x, need_weights=False, attn_mask=hidden, is_causal=causal)[0]
        return out


class Block(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.residual = recipe.residual
        self.norm = nn.LayerNorm(recipe.width, bias=False)
        self.attention = Torchs(recipe) if recipe.call == "mha" else Attention(recipe)
        inner = recipe.mlp * recipe.width
        self.mlp = (
            nn.Sequential(
                nn.LayerNorm(recipe.width, bias=False), matrix(recipe.width, inner), nn.GELU(),
                matrix(inner, recipe.width),
            )
            if inner
            else None
        )  # fmt: skip

    def forward(self, x: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
        y = self.attention(self.norm(x), seen, causal)
        x = x + y if self.residual else y
        return x if self.mlp is None else x + self.mlp(x)


class Transformer(nn.Module):
    """A decoder of bytes, or a classifier of images without causal mask."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        patch = PATCH.get(recipe.data)
        self.causal, self.window, self.pooled = recipe.data not in SEE_ALL, recipe.window, patch is not None
        self.alibi = slopes(recipe.heads, recipe.length) if recipe.position == "alibi" else None
        self.embedding: nn.Module = (
            nn.Embedding(256, recipe.width) if patch is None else nn.Linear(patch**2, recipe.width)
        )
        places = recipe.length if patch is None else (8 // patch) ** 2
        self.position = (
            nn.Parameter(torch.randn(places, recipe.width) * (0.3 if patch is None else 0.5))
            if recipe.position == "learned"
            else None
        )
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.width, bias=False)
        self.head = matrix(recipe.width, CLASSES.get(recipe.data, 256), 0.5)
        if recipe.shared:
            nn.init.normal_(cast(nn.Embedding, self.embedding).weight, std=recipe.width**-0.5)
            self.head.weight = cast(nn.Embedding, self.embedding).weight

    def forward(self, batch: Batch) -> Tensor:  # [B, T, 256], or [B, 10] of images
        x = self.embedding(batch.inputs)
        if self.position is not None:
            x = x + self.position
        seen = self._seen(batch)
        for block in self.blocks:
            x = block(x, seen, self.causal)
        x = self.norm(x)
        out: Tensor = self.head(x.mean(1) if self.pooled else x)
        return out

    def _seen(self, batch: Batch) -> Tensor | None:
        """Which keys a row may see, where causality alone does not say it; or what ALiBi adds to its logits."""
        if self.alibi is not None:
            return self.alibi
        if not self.window and batch.padding is None:
            return None
        length = batch.inputs.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window:
            seen = seen.triu(1 - self.window)
        return seen if batch.padding is None else seen & ~batch.padding[:, None, None, :]


def sizes(recipe: Recipe) -> dict[str, Any]:
    """A recipe in the words of a config of transformers."""
    return {
        "vocab_size": 256,
        "hidden_size": recipe.width,
        "intermediate_size": recipe.mlp * recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "max_position_embeddings": recipe.length,
    }


class Qwen3(nn.Module):
    """The Qwen3 of transformers, tiny: grouped heads, RoPE, RMSNorm on queries and keys."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        from tests import vision as vision  # before transformers
        from transformers import Qwen3Config, Qwen3ForCausalLM

        keys = {"num_key_value_heads": recipe.heads // 2, "head_dim": recipe.width // recipe.heads}
        self.inner = Qwen3ForCausalLM(Qwen3Config(**sizes(recipe), **keys))

    def forward(self, batch: Batch) -> Tensor:
        out: Tensor = self.inner(input_ids=batch.inputs, use_cache=False).logits
        return out


def matrix(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=gain * inputs**-0.5)
    return linear


def build(recipe: Recipe) -> nn.Module:
    """The model as it begins. Draws on torch's random state."""
    if recipe.call == "qwen3":
        return Qwen3(recipe)
    model = Transformer(recipe)
    if recipe.start:
        with torch.no_grad():
            STARTS[recipe.start](model)
    return model


# --- how weights begin, where not as they are drawn -----------------------------------------------------------------


STRENGTH = 3.0
"""Of a sink that is built in: logits of about 40."""


def _attentions(model: Transformer) -> list[Attention]:
    return [cast(Attention, cast(Block, block).attention) for block in model.blocks]


def tied(model: Transformer) -> None:
    """W_q = W_k, three times as large: every query finds itself."""
    for attention in _attentions(model):
        attention.q_proj.weight.mul_(3)
        attention.k_proj.weight.copy_(attention.q_proj.weight)


def blind(model: Transformer) -> None:
    """W_q = 0: uniform attention, and no gradient to W_k."""
    for attention in _attentions(model):
        attention.q_proj.weight.zero_()


def _places(model: Transformer) -> nn.Parameter:
    if model.position is None:
        raise ValueError("expected learned positions for a built-in sink, found none; leave start or position away")
    return model.position


def _sinks(model: Transformer, keys: list[Tensor]) -> None:
    """Give every head a sink: each query carries a common direction, which finds the keys that carry the head's own.

    keys: for each head of a layer a direction of unit length, orthogonal to the others.
    """
    common = _directions(model, len(keys) + 1)[-1]
    _places(model).add_(4 * common)
    for attention in _attentions(model):
        size = attention.q_proj.weight.shape[0] // attention.heads
        for head, key in enumerate(keys):
            attention.q_proj.weight[head * size] += STRENGTH * common
            attention.k_proj.weight[head * size] += STRENGTH * key


def _directions(model: Transformer, count: int) -> Tensor:
    """`[count, width]`, orthonormal and of mean 0, so that layer norms keep them; always the same."""
    width = _places(model).shape[1]
    drawn = torch.randn(width, count, generator=torch.Generator().manual_seed(7))
    basis: Tensor = torch.linalg.qr(drawn - drawn.mean(0)).Q
    return basis.T


def sinks_first(model: Transformer) -> None:
    """Every head looks at the byte START, the first key of all sequences."""
    heads = _attentions(model)[0].heads
    key = _directions(model, heads + 1)[0]
    cast(nn.Embedding, model.embedding).weight[START] = 8 * key
    _sinks(model, [key] * heads)


def sinks_apart(model: Transformer) -> None:
    """Head h looks at key h: only one head in all looks at the first key."""
    heads = _attentions(model)[0].heads
    keys = list(_directions(model, heads + 1)[:-1])
    for place, key in enumerate(keys):
        _places(model)[place] += 8 * key
    _sinks(model, keys)


def sinks_spread(model: Transformer) -> None:
    """Every head looks at the first two keys alike."""
    heads = _attentions(model)[0].heads
    key = _directions(model, heads + 1)[0]
    _places(model)[:2] += 8 * key
    _sinks(model, [key] * heads)


def sinks_separators(model: Transformer) -> None:
    """Every head looks at line ends and spaces, wherever they are."""
    heads = _attentions(model)[0].heads
    key = _directions(model, heads + 1)[0]
    for byte in b"\n ":
        cast(nn.Embedding, model.embedding).weight[byte] += 8 * key
    _sinks(model, [key] * heads)


STARTS: dict[str, Callable[[Transformer], None]] = {
    start.__name__: start for start in (tied, blind, sinks_first, sinks_apart, sinks_spread, sinks_separators)
}
