"""Attention written by hand: a product of two activations, masks, a softmax.

The logits are then known as they are, whatever scale, bias and mask went into them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnwatch.hooks.attention import HIDDEN_MASK, Attention
from attnwatch.hooks.projections import product
from attnwatch.hooks.shapes import bind, form_of, four, four_mask, spread
from attnwatch.hooks.tap import Frame, Pair, Seen, Tap


def matmul(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if not isinstance(out, Tensor):
        return
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if len(operands) < 2:
        return
    a, b = operands[-2:]  # baddbmm and addmm name the addend first
    if b.dim() == 2:
        if a.dim() >= 2 and a.shape[-1] == b.shape[0]:
            product(tap, a, b.t(), out)
    elif a.dim() >= 3 and b.dim() >= 3:
        pair(tap, a, b.transpose(-1, -2), out)


def pair(tap: Tap, q: Tensor, k: Tensor, out: Tensor) -> None:
    site = tap.site
    if site.map_shape is not None and _alike(q.shape, site.map_shape):
        site.map_shape = None  # the attention map times the values
        return
    site.pairs = [*site.pairs[-3:], Pair(q.detach(), k.detach(), out.shape)]
    site.visible.clear()
    site.shifts.clear()


def _shown(x: Any) -> Tensor | bool:
    """Where a number or a tensor that takes the place of scores hides nothing. NaN shows."""
    return ~(x.detach() <= HIDDEN_MASK) if isinstance(x, Tensor) else not x <= HIDDEN_MASK


def _is_scores(site: Frame, x: Any) -> bool:
    return bool(site.pairs) and isinstance(x, Tensor) and _alike(x.shape, site.pairs[-1].shape)


def _alike(a: torch.Size, b: torch.Size) -> bool:
    """Whether one may be a view of the other with its leading dimensions folded."""
    return a[-2:] == b[-2:] and a.numel() == b.numel()


def masked_fill(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "mask", "value"), args, kwargs)
    if _is_scores(tap.site, out):
        _note(tap, ~call["mask"].detach() | _shown(call["value"]), out)


def where(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Of scores and what hides them; or of two scores, as where near and far keys are scored in two ways."""
    names = ("condition", "input", "other")
    if args and args[0].dtype != torch.bool:  # the method: scores.where(condition, other)
        names = ("input", "condition", "other")
    call = bind(names, args, kwargs)
    if "other" not in call or not _is_scores(tap.site, out):
        return
    sides = [call["input"], call["other"]]
    scored = [_is_scores(tap.site, x) for x in sides]
    if any(scored):
        whole = all(scored)  # a tensor of their shape may be what hides them
        one, other = (_shown(x) if whole or not is_scored else True for x, is_scored in zip(sides, scored, strict=True))
        condition = call["condition"].detach()
        # Not torch.where: on an accelerator that waits to copy what a number on the host says.
        _note(tap, (condition & one) | (~condition & other), out)


def add(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A float mask is an addend that learns nothing; a learned bias is not a mask."""
    if _is_scores(tap.site, out):
        for addend in args[:2]:
            constant = isinstance(addend, Tensor) and not addend.requires_grad and addend.is_floating_point()
            if constant and _by_key(addend):
                _note(tap, addend.detach() > HIDDEN_MASK, out)


def _by_key(x: Tensor) -> bool:
    """Whether it differs from key to key: the softmax does not see what is the same for a whole row."""
    return x.dim() > 0 and x.shape[-1] > 1


def sub(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A mask taken away, or a softmax kept stable by hand: then the row's constant is put back to see the logits."""
    if len(args) != 2 or not isinstance(args[1], Tensor) or not _is_scores(tap.site, out):
        return
    taken = args[1].detach()
    if _by_key(taken):
        if not args[1].requires_grad:
            add(tap, func, (args[0], -taken), kwargs, out)
    elif taken.is_floating_point():
        tap.site.shifts.append(spread(taken, out.shape))


def _note(tap: Tap, visible: Tensor, out: Tensor) -> None:
    tap.site.visible.append(spread(visible, out.shape))


def softmax(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "dim"), args, kwargs)
    x, dim, site = call["input"], call.get("dim"), tap.site
    if not isinstance(out, Tensor) or out.dim() < 3 or dim not in (-1, out.dim() - 1):
        return
    made = [pair for pair in site.pairs if _alike(pair.shape, x.shape)]
    if not made:
        return  # a router, a classifier: no product of two activations behind it
    # Scores may be a sum of products (relative positions): q and k are the first two that both have every sequence.
    scored = next((p for p in made if p.q.shape[0] == p.k.shape[0] and p.q.dim() == p.k.dim()), made[-1])
    form = form_of(site, x, scored.k)
    mask = None
    for visible in site.visible:
        part = four_mask(visible, form)
        mask = part if mask is None else mask & part
    shift = None
    for taken in site.shifts:
        part = four_mask(taken, form).float()
        shift = part if shift is None else shift + part
    attention = Attention(
        q=four(scored.q, form), k=four(scored.k, form), scores=four(x.detach(), form), mask=mask, shift=shift
    )
    site.pairs.clear()
    site.visible.clear()
    site.shifts.clear()
    site.map_shape = out.shape
    tap.report(Seen(attention, folded=form.folded))
