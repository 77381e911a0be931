"""Projections and norms on the way to queries and keys: only looked at in a step in which the weights are."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attnwatch.hooks.shapes import bind
from attnwatch.hooks.tap import KEPT, Norm, Product, Tap


def linear(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "weight"), args, kwargs)
    product(tap, call["weight"], out)


def addmm(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "mat1", "mat2"), args, kwargs)
    product(tap, call["mat2"].t(), out)


def product(tap: Tap, weight: Tensor, out: Tensor) -> None:
    tokens = out.numel() // max(1, out.shape[-1])
    stride = max(1, tokens // 16) | 1  # odd: the rows fall on different positions of different sequences
    rows = out.detach().reshape(tokens, -1)[::stride][:16].clone() if tap.look else None
    products = tap.site.products
    products.append(Product(weight.detach(), out.shape[:-1], stride, rows))
    del products[:-KEPT]


def layer_norm(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if tap.look:
        size = math.prod(bind(("input", "normalized_shape"), args, kwargs)["normalized_shape"])
        rest, named = args[1:], {key: value for key, value in kwargs.items() if key != "input"}
        tap.site.norms.append(Norm(func.__name__, lambda x: func(x, *rest, **named), size, True))


def normalize(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "p", "dim"), args, kwargs)
    dim = call.get("dim", 1)
    if tap.look and call.get("p", 2) == 2 and dim in (-1, out.dim() - 1):
        tap.site.norms.append(Norm("normalize", lambda x: F.normalize(x, dim=-1), out.shape[-1], True))
