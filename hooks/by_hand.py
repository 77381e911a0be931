"""Attention written by hand: a product of two activations, masks, a softmax.

The logits are then known as they are, whatever scale, bias and mask went into them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.projections import product
from attnwatch.hooks.shapes import batch_of, bind, four, four_mask
from attnwatch.hooks.tap import Frame, Pair, Seen, Tap

HIDDEN = -9999.0
"""Hand-written masks add or fill with -1e4, -1e9, -inf or the dtype's minimum: anything lower hides a key."""


def matmul(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if not isinstance(out, Tensor):
        return
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if len(operands) < 2:
        return
    a, b = operands[-2:]  # baddbmm and addmm name the addend first
    if b.dim() == 2:
        if a.dim() >= 2 and a.shape[-1] == b.shape[0]:
            product(tap, b.t(), out)
    elif a.dim() >= 3 and b.dim() >= 3:
        _pair(tap, a, b.transpose(-1, -2), out)


def einsum(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """`bhid,bhjd->bhij` in any letters: one letter summed, the last two of the result are rows and keys."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    equation = str(args[0]).replace(" ", "")
    if len(operands) != 2 or equation.count("->") != 1 or "." in equation:
        return
    inputs, result = equation.split("->")
    first, second = inputs.split(",")
    summed = [c for c in first if c in second and c not in result]
    if len(summed) != 1 or len(result) < 3 or result[-1] in first or result[-2] in second:
        return
    row, key, lead = result[-2], result[-1], result[:-2]
    if row not in first or key not in second:
        return

    def ordered(labels: str, x: Tensor, last: str) -> Tensor:
        kept = [c for c in lead if c in labels]
        x = x.permute(*[labels.index(c) for c in (*kept, last, summed[0])])
        for position, c in enumerate(lead):
            if c not in labels:
                x = x.unsqueeze(position)
        return x

    if len(set(first)) == len(first) and len(first) <= len(result) and len(second) <= len(result):
        _pair(tap, ordered(first, operands[0], row), ordered(second, operands[1], key), out)


def _pair(tap: Tap, q: Tensor, k: Tensor, out: Tensor) -> None:
    site = tap.site
    site.pairs = [*site.pairs[-3:], Pair(q.detach(), k.detach(), out.shape)]
    site.visible.clear()


def _hides(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and value <= HIDDEN)


def _is_scores(site: Frame, x: Any) -> bool:
    return (
        bool(site.pairs)
        and isinstance(x, Tensor)
        and x.numel() == site.pairs[-1].shape.numel()
        and x.shape[-2:] == site.pairs[-1].shape[-2:]
    )


def masked_fill(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "mask", "value"), args, kwargs)
    if _is_scores(tap.site, out) and _hides(call["value"]):
        tap.site.visible.append(~call["mask"].detach())


def where(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("condition", "input", "other"), args, kwargs)
    if "input" not in call or not _is_scores(tap.site, out):
        return
    condition = call["condition"].detach()
    if _is_scores(tap.site, call["input"]) and _hides(call["other"]):
        tap.site.visible.append(condition)
    elif _is_scores(tap.site, call["other"]) and _hides(call["input"]):
        tap.site.visible.append(~condition)


def add(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A float mask is an addend that learns nothing; a learned bias is not a mask."""
    call = bind(("input", "other"), args, kwargs)
    if _is_scores(tap.site, out):
        addend = call["input"] if _is_scores(tap.site, call["other"]) else call["other"]
        if isinstance(addend, Tensor) and not addend.requires_grad and addend.is_floating_point():
            tap.site.visible.append(addend.detach() > HIDDEN)


def softmax(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "dim"), args, kwargs)
    x, dim, site = call["input"], call.get("dim"), tap.site
    if not isinstance(out, Tensor) or out.dim() < 3 or dim not in (-1, out.dim() - 1):
        return
    pair = next(
        (p for p in reversed(site.pairs) if p.shape[-2:] == x.shape[-2:] and p.shape.numel() == x.numel()),
        None,
    )
    if pair is None:
        return  # a router, a classifier: no product of two activations behind it
    batch, folded = batch_of(site, x) if x.dim() == 3 else (x.shape[0], False)  # q and k may be folded all the same
    grouped = x.dim() == 5 and pair.k.shape[2] == 1
    scores = four(x.detach(), batch, grouped)
    mask = None
    for visible in site.visible:
        part = four_mask(visible, batch, scores.shape[1], grouped)
        mask = part if mask is None else mask & part
    q, k = four(pair.q, batch, grouped), four(pair.k, batch, grouped)
    site.pairs.clear()
    site.visible.clear()
    tap.report(Seen(Attention(q=q, k=k, scores=scores, mask=mask), folded=folded))
