"""Arguments by name, and the many shapes in which code holds heads, brought to `[B, H, T, d]`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnwatch.hooks.tap import Frame


def bind(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def batch_of(site: Frame, x: Tensor) -> tuple[int, bool]:
    """Sequences in a tensor whose first dimension may be sequences * heads, and whether that could not be told.

    A projection of the same module knows how many tokens there are: tokens / rows = sequences."""
    if x.dim() != 3:
        return 0, False
    for product in site.products:
        batch, rest = divmod(product.tokens, x.shape[-2])
        if not rest and batch and x.shape[0] % batch == 0:
            return batch, False
    return x.shape[0], True


def four(x: Tensor, batch: int, grouped: bool = False) -> Tensor:
    """To `[B, H, T, d]`. 3-D: sequences * heads, folded. 5-D: `[B, Hk, group, T, d]` if grouped, else windows join B."""
    if x.dim() == 3:
        return x.reshape(batch, -1, *x.shape[1:])
    if x.dim() == 5 and grouped:
        return x.flatten(1, 2)
    return x.flatten(0, -4) if x.dim() > 4 else x


def four_mask(mask: Tensor, batch: int, heads: int, grouped: bool = False) -> Tensor:
    if mask.dim() == 3 and batch:
        return mask.reshape(batch, -1, *mask.shape[1:]) if mask.shape[0] == batch * heads else mask.unsqueeze(1)
    if mask.dim() == 5 and grouped:
        return (
            mask.expand(-1, -1, max(1, heads // mask.shape[1]), -1, -1).flatten(1, 2)
            if mask.shape[1] > 1
            else mask[:, :, 0]
        )
    return mask.flatten(0, -4) if mask.dim() > 4 else mask
