"""Eigenvalues, many at once: the one thing that statistics need and that no device gives without being waited for.

torch checks them for errors on the host. So the hooks of a forward only make the symmetric matrices, `d x d` or
rows x rows; their eigenvalues are taken after the step, where a sample waits for its device anyway, those of all layers
and heads of one size together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

TOGETHER = 2**25
"""Most elements of matrices that are stacked for one call."""


def eigenvalues(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Of symmetric `[..., n, n]` each: `[..., n]`, ascending, computed in `dtype`. The host waits for the device."""
    alike: defaultdict[tuple[torch.device, int], list[int]] = defaultdict(list)
    for at, matrix in enumerate(matrices):
        alike[matrix.device, matrix.shape[-1]].append(at)
    found: dict[int, Tensor] = {}
    for (_, n), places in alike.items():
        flat = [matrices[at].reshape(-1, n, n).to(dtype) for at in places]
        solved = torch.cat([torch.linalg.eigvalsh(some) for some in _stacks(flat, n)])
        parts = solved.split([len(one) for one in flat])
        found |= {at: part.view(matrices[at].shape[:-1]) for at, part in zip(places, parts, strict=True)}
    return [found[at] for at in range(len(matrices))]


def _stacks(flat: list[Tensor], n: int) -> Sequence[Tensor]:
    return flat if len(flat) == 1 else torch.cat(flat).split(max(1, TOGETHER // n**2))


def effective_rank(energy: Tensor) -> Tensor:
    """exp of the entropy of the shares of `energy` `[..., n]` (Roy and Vetterli 2007); NaN where there is none."""
    entropy: Tensor = torch.special.entr(energy / energy.sum(-1, keepdim=True)).sum(-1)
    return entropy.exp()
