"""`torch.einsum`: scores `bhid,bhjd->bhij` or a projection `bti,hid->bthd`, in any letters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnwatch.hooks.by_hand import pair
from attnwatch.hooks.projections import product
from attnwatch.hooks.tap import Tap


def einsum(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, arrow, result = str(args[0]).replace(" ", "").partition("->")
    if len(operands) != 2 or not arrow:
        return
    first, second = (_spell(*part) for part in zip(inputs.split(","), operands, strict=True))
    result = _spell(result, out)
    summed = [c for c in first if c in second and c not in result]
    if len(summed) != 1 or {*first, *second} != {*result, *summed} or any(len({*x}) < len(x) for x in (first, second)):
        return
    if not {*first} & {*second} & {*result}:
        _projection(tap, (first, second, result), operands, out, summed[0])
    if len(result) >= 3 and result[-2] in {*first} - {*second} and result[-1] in {*second} - {*first}:
        q, k = (_ordered(x, labels, summed[0], result) for x, labels in zip(operands, (first, second), strict=True))
        pair(tap, q, k, out)


def _spell(labels: str, x: Tensor) -> str:
    """The dots as letters that no equation has, the same for the same dimension counted from the right."""
    return labels.replace("...", "αβγδεζηθ"[len(labels) - x.dim() - 3 :] if x.dim() > len(labels) - 3 else "")


def _ordered(x: Tensor, labels: str, summed: str, result: str) -> Tensor:
    """`[lead of the result, positions, features]`, 1 where x lacks a dimension of the lead."""
    x = x.permute(*[labels.index(c) for c in (*result, summed) if c in labels])
    for position, c in enumerate(result[:-2]):
        if c not in labels:
            x = x.unsqueeze(position)
    return x


def _projection(tap: Tap, labels: tuple[str, str, str], operands: Any, out: Tensor, summed: str) -> None:
    """Tokens times a weight: no dimension of one operand goes along with one of the other."""
    first, second, result = labels
    weight = operands[1]
    made = [c for c in result if c in second]
    if not made or len(made) == len(result):
        return
    rows = weight.permute(*[second.index(c) for c in (*made, summed)]).flatten(0, -2)
    of_tokens = out.permute(*[result.index(c) for c in result if c in first], *[result.index(c) for c in made])
    name = next((name for name, parameter in tap.site.module.named_parameters() if parameter is weight), "")
    product(tap, operands[0], rows, of_tokens.flatten(-len(made)), name)
