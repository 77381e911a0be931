"""Arguments by name, and the many shapes in which code holds heads, brought to `[B, H, T, d]`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks.tap import Frame


class Form(NamedTuple):
    """How one call holds its heads. grid: sizes of the two dimensions of heads in 5-D tensors, empty for none; groups:
    which of them (1 or 2) counts the queries that share a key. folded: heads could not be told from sequences."""

    batch: int
    heads: int
    grid: tuple[int, ...] = ()
    groups: int = 0
    folded: bool = False


def bind(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def form_of(site: Frame, x: Tensor, k: Tensor) -> Form:
    """x: queries `[..., Tq, d]` or scores `[..., Tq, Tk]`; k: keys `[..., Tk, d]`.

    Where shapes leave it open, projections of the same module tell: they know how many tokens, so sequences, there are.
    """
    length, tokens = x.shape[-2], {product.tokens for product in site.products}
    if x.dim() < 3:
        return Form(1, 1)
    if x.dim() == 3:
        counts = [n for n in range(1, x.shape[0] + 1) if x.shape[0] % n == 0 and n * length in tokens]
        both = [n for n in counts if n * k.shape[-2] in tokens]
        batch = (both or counts or [0])[0]
        return Form(batch, x.shape[0] // batch) if batch else Form(x.shape[0], 1, folded=True)
    shared = 1 if _repeats(k, 1, x) else 2
    if x.dim() == 5 and (x.shape[0] * length in tokens or _repeats(k, shared, x)):
        return Form(x.shape[0], x.shape[1] * x.shape[2], tuple(x.shape[1:3]), shared)
    return Form(x.shape[:-3].numel(), x.shape[-3])


def _repeats(k: Tensor, dim: int, x: Tensor) -> bool:
    """Whether all of x's heads along this dimension use the same keys."""
    return k.dim() == 5 and x.shape[dim] > 1 and (k.shape[dim] == 1 or k.stride(dim) == 0)


def four(x: Tensor, form: Form) -> Tensor:
    """To `[B, H, T, d]`. 3-D: sequences * heads, folded. 5-D: heads in groups, else windows, each a sequence."""
    if x.dim() == 2:
        return x[None, None]
    if x.dim() == 3:
        return x.reshape(form.batch, -1, *x.shape[1:])
    if x.dim() == 5 and form.grid:
        return _grid(x, form)
    return x.flatten(0, -4) if x.dim() > 4 else x


def four_mask(mask: Tensor, form: Form) -> Tensor:
    """The same for a mask that broadcasts against the scores."""
    if form.grid and mask.dim() >= 4:
        mask = mask[None] if mask.dim() == 4 else mask
        same = mask.shape[1:3].numel() == 1
        return mask[:, 0] if same else _grid(mask.expand(-1, *form.grid, -1, -1), form)
    if mask.dim() == 3 and mask.shape[0] == form.batch * form.heads:
        return mask.reshape(form.batch, form.heads, *mask.shape[1:])
    return mask.flatten(0, -4) if mask.dim() > 4 else mask


def spread(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask of windows as large as the scores `shape` in all dimensions before the heads', which may yet be folded."""
    if len(shape) <= 4 or mask.dim() <= 3:
        return mask
    return mask.expand(*shape[:-3], *mask.shape[-3:])


def _grid(x: Tensor, form: Form) -> Tensor:
    """Query heads in the order of their key heads."""
    return (x.transpose(1, 2) if form.groups == 1 else x).flatten(1, 2)
