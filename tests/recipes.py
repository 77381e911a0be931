"""Small training recipes that differ in how they attend and how they train; the same seeds give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import attnwatch
from attnwatch import Monitor

WIDTH, HEADS, LENGTH, BATCH, TOKENS, STEPS = 32, 4, 12, 3, 50, 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v `[B, H, T, d]` to `[B, H, T, d]`, causal, with dropout."""


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return F.dropout(scores.masked_fill(future, -torch.inf).softmax(-1), 0.1) @ v


def overwriting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every intermediate is overwritten as soon as autograd allows it."""
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores.div_(q.shape[-1] ** 0.5)
    scores += torch.full_like(scores, -1e9).triu(1)
    maps = F.softmax(scores, dim=-1)
    scores.detach().zero_()
    return F.dropout(maps, 0.1) @ v


class Attention(nn.Module):
    def __init__(self, attend: Attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return out


class Grouped(nn.Module):
    """Two key heads, rotary embedding, query-key norm, a spectral norm on the projection of the queries."""

    def __init__(self, attend: Attend, spectral: bool = False):
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, WIDTH // 2, WIDTH // 2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)
        if spectral:  # its buffers move whenever somebody reads `self.q.weight` in training
            spectral_norm(self.q)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = self.attend(_rotate(self.q_norm(q)), _rotate(self.k_norm(k)), v)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * 10.0 ** -torch.arange(half, device=x.device)
    a, b = x[..., :half], x[..., half:]
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    return turned.to(x.dtype)


class Block(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """reentrant: kind of activation checkpoint around each block; None for none."""

    def __init__(self, attention: Callable[[], nn.Module], reentrant: bool | None = None):
        super().__init__()
        self.reentrant = reentrant
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [B, T] to logits [B, T, tokens]
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


def forward(model: Decoder) -> None:
    """One batch, there and back."""
    model(torch.randint(TOKENS, (BATCH, LENGTH))).sum().backward()


class Encoder(nn.Module):
    """torch's own layers, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = torch.arange(LENGTH, device=tokens.device) >= torch.tensor([[LENGTH], [LENGTH - 3], [LENGTH - 5]])
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=padding.to(tokens.device))
        out: Tensor = self.head(x)
        return out


class Translator(nn.Module):
    """torch's own encoder and decoder, with cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, WIDTH, dropout=0.1, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        out: Tensor = self.head(self.transformer(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True))
        return out


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2)]


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def both(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [SGD(matrices, lr=0.1, momentum=0.9), AdamW(rest, lr=1e-2)]


@dataclass(frozen=True)
class Recipe:
    """micro: batches a step. cast: type of autocast. scale: loss scale to begin with, 0 for none. hook: the optimizer's
    hook counts the steps. evaluate: an evaluation pass after every step."""

    model: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    micro: int = 1
    cast: torch.dtype | None = None
    scale: float = 0.0
    hook: bool = False
    evaluate: bool = False

    def train(self, run: Path, every: int | None) -> tuple[list[Tensor], Monitor | None]:
        """All that training leaves: losses, gradients and weights of every step, buffers, optimizer and random states.

        every: cadence of the samples; None is unwatched."""
        torch.manual_seed(0)
        model = self.model()
        optimizers = self.optimizers(model)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=self.scale or 1.0, backoff_factor=2.0**-12, enabled=self.scale > 0
        )
        monitor = None
        if every is not None:
            hooked = optimizers[0] if self.hook else None
            monitor = attnwatch.watch(model, run=run, every=every, report=False, optimizer=hooked)
        left: list[Tensor] = []
        for _ in range(STEPS):
            for _ in range(self.micro):
                loss = self._loss(model)
                scaler.scale(loss).backward()
                left.append(loss.detach().clone())
            left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            if monitor is not None:
                monitor.step(loss=loss)
            if self.evaluate:
                model.eval()
                with torch.no_grad():
                    left.append(self._loss(model))
                model.train()
            left += [x.detach().clone() for x in model.state_dict().values()]
        if monitor is not None:
            monitor.close()
        left += [x for o in optimizers for state in o.state.values() for x in state.values() if isinstance(x, Tensor)]
        return [*left, torch.get_rng_state()], monitor

    def _loss(self, model: nn.Module) -> Tensor:
        tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))
        cast: AbstractContextManager[object] = nullcontext()
        if self.cast is not None:
            cast = torch.autocast("cpu", self.cast)
        with cast:
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


_FUSED, _BY_HAND = partial(Attention, fused), partial(Attention, by_hand)

RECIPES = {
    "fused": Recipe(partial(Decoder, _FUSED)),
    "by hand": Recipe(partial(Decoder, _BY_HAND)),
    "by hand, overwriting": Recipe(partial(Decoder, partial(Attention, overwriting))),
    "fused, reentrant checkpoints": Recipe(partial(Decoder, _FUSED, True)),
    "fused, other checkpoints": Recipe(partial(Decoder, _FUSED, False)),
    "by hand, reentrant checkpoints": Recipe(partial(Decoder, _BY_HAND, True)),
    "by hand, other checkpoints": Recipe(partial(Decoder, _BY_HAND, False)),
    "three micro-batches": Recipe(partial(Decoder, _FUSED), micro=3),
    "bfloat16 autocast": Recipe(partial(Decoder, _FUSED), cast=torch.bfloat16),
    "bfloat16 autocast, checkpoints": Recipe(partial(Decoder, _BY_HAND, False), micro=2, cast=torch.bfloat16),
    "bfloat16 model": Recipe(lambda: Decoder(_FUSED).bfloat16()),
    "float16 autocast, loss scale": Recipe(partial(Decoder, _FUSED), cast=torch.float16, scale=2.0**10),
    "float16, first step skipped": Recipe(partial(Decoder, _FUSED), cast=torch.float16, scale=2.0**22, hook=True),
    "nn.TransformerEncoder": Recipe(Encoder),
    "nn.TransformerEncoder, autocast": Recipe(Encoder, cast=torch.bfloat16),
    "nn.Transformer": Recipe(Translator),
    "grouped, rotary, QK-norm": Recipe(partial(Decoder, partial(Grouped, fused))),
    "spectral norm": Recipe(partial(Decoder, partial(Grouped, fused, True))),
    "optimizer hook": Recipe(partial(Decoder, _FUSED), hook=True),
    "two optimizers": Recipe(partial(Decoder, _FUSED), both, hook=True),
    "SGD": Recipe(partial(Decoder, _BY_HAND), sgd),
    "evaluation in between": Recipe(partial(Decoder, _BY_HAND), evaluate=True),
}
