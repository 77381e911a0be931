"""Made-up tasks that small transformers solve perfectly, with sharp heads: what healthy attention can look like.

They stand beside the real data of data.py. Sources as there; tokens are below 256 so that the models are the same.
"""

from __future__ import annotations

import torch
from benchmarks.detection.data import IGNORED, Batch, Source
from torch import Generator, Tensor

LETTERS = 16
"""So many different tokens, from 1 on; 0 separates."""
JUMP = 0.25
"""Chance that a walk of `own_map` leaves its map."""


def _letters(batch: int, length: int, generator: Generator) -> Tensor:
    return torch.randint(1, LETTERS + 1, (batch, length), generator=generator)


def _answered(given: Tensor, answer: Tensor) -> Batch:
    """The given tokens, a separator, the answer to be predicted token by token."""
    x = torch.cat([given, torch.zeros(len(given), 1, dtype=torch.long), answer], 1)
    targets = x[:, 1:].clone()
    targets[:, : given.shape[1]] = IGNORED
    return Batch(x[:, :-1], targets)


def copy_string(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Half of the length in letters, to be repeated."""
    given = _letters(batch, length // 2, generator)
    return _answered(given, given)


def sort_string(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """The same, to be sorted."""
    given = _letters(batch, length // 2, generator)
    return _answered(given, given.sort(1).values)


def recall(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """A third of the length in pairs of key and value, each key once; then keys of these, each to be followed by its
    value."""
    pairs = length // 6
    keys = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(batch)])
    values = pairs + torch.randint(0, pairs, keys.shape, generator=generator)
    asked = torch.randint(0, pairs, (batch, (length - 2 * pairs) // 2), generator=generator)
    told, questions = (
        torch.stack([k, v], 2).flatten(1) for k, v in ((keys, values), (keys.gather(1, asked), values.gather(1, asked)))
    )
    x = torch.cat([told, questions], 1)
    targets = torch.full_like(x, IGNORED)
    targets[:, 2 * pairs :: 2] = x[:, 2 * pairs + 1 :: 2]
    return Batch(x, targets)


def own_map(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """A walk over LETTERS along a random map of the sequence's own, one step in four at random: what followed a letter
    before is what follows it again (induction)."""
    follow = torch.stack([torch.randperm(LETTERS, generator=generator) for _ in range(batch)])
    jumps = torch.rand(batch, length + 1, generator=generator) < JUMP
    walk = torch.randint(0, LETTERS, (batch, length + 1), generator=generator)
    for place in range(1, length + 1):
        along = follow.gather(1, walk[:, place - 1 : place])[:, 0]
        walk[:, place] = torch.where(jumps[:, place], walk[:, place], along)
    return Batch(walk[:, :-1], walk[:, 1:])


def maximum(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Letters, each to be answered by the largest of all. Without causal mask."""
    x = _letters(batch, length, generator)
    return Batch(x, x.max(1, keepdim=True).values.expand(-1, length))


def reverse(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Letters, to be answered in reverse. Without causal mask."""
    x = _letters(batch, length, generator)
    return Batch(x, x.flip(1))


TASKS: dict[str, Source] = {
    task.__name__: task for task in (copy_string, sort_string, recall, own_map, maximum, reverse)
}
