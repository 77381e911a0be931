"""A small decoder and its training, by one process or by each of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnwatch import Monitor

WIDTH, HEADS, KV_HEADS, LENGTH, BATCH, TOKENS, STEPS = 32, 4, 2, 12, 4, 50, 4
WATCH: dict[str, Any] = {"every": 2, "spectrum_every": 1, "rows": None, "sequences": 1000, "report": False}

Watching = Callable[[nn.Module], Monitor | None]
"""Watches a model, or does not."""


class Attention(nn.Module):
    """As many heads as the projections make: fewer on each rank of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        d = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * d, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(blocks)})

    def forward(self, x: Tensor) -> Tensor:  # int64 [B, T] to logits [B, T, tokens]; a stage has only some of these
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def decoder(blocks: int = 2) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(blocks)
    with torch.no_grad():
        for block in model.blocks.values():
            block.get_submodule("attention.q").weight.mul_(8)  # maps that are not uniform
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: tokens and the ones that follow."""
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


Step = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Forward and backward on a share of a batch; the loss."""


def step_of(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    loss = loss_of(model(tokens), target)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, share: slice, watching: Watching, step: Step = step_of) -> list[Tensor]:
    """Losses, and at the end the weights that this rank holds. share: of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watching(model)
    left = []
    for number in range(STEPS):
        loss = step(model, *(x[share] for x in batch(number)))
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss)
        if monitor is not None:
            monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
    return left + held([model])


def held(models: Iterable[nn.Module]) -> list[Tensor]:
    """The weights that this rank holds."""
    return [local(x) for model in models for x in model.state_dict().values()]


def local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


def part(rank: int, ranks: int) -> slice:
    return slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
