"""Projections and norms on the way to queries and keys: only looked at in a step in which the weights are."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnwatch.hooks.shapes import bind
from attnwatch.hooks.sharded import local
from attnwatch.hooks.sites import is_leaf, looks_like_attention
from attnwatch.hooks.tap import CLOCK, Frame, Norm, Product, Tap

_NORM = re.compile(r"norm|rms|l2", re.IGNORECASE)


def linear(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "weight"), args, kwargs)
    product(tap, call["input"], call["weight"], out)


def addmm(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "mat1", "mat2"), args, kwargs)
    product(tap, call["mat1"], call["mat2"].t(), out)


def product(tap: Tap, source: Tensor, weight: Tensor, out: Tensor, name: str = "") -> None:
    """`source @ weight.t()` was computed."""
    found = projected(tap.look, weight, out, name)._replace(parts=tap.parts)
    if tap.look:
        found = _whole(_lasting(found, tap.frames), source, tap.site.products)
    tap.site.project([found])


def _lasting(last: Product, frames: list[Frame]) -> Product:
    """Of an attention layer's projection that is sharded by itself a copy: the weight is whole in its forward only."""
    unit = frames[-1].module
    inner = getattr(unit, "_fsdp_wrapped_module", unit)
    is_sharded = inner is not unit or hasattr(unit, "_get_fsdp_state")
    if not is_sharded or not is_leaf(inner) or len(frames) < 2 or not looks_like_attention(frames[-2].module):
        return last
    name = f"{frames[-1].name.rpartition('.')[2]}.weight"
    return last._replace(weight=last.weight.clone(), name=last.name or name)


def _whole(last: Product, source: Tensor, earlier: list[Product]) -> Product:
    """A factored projection as one: where its input is what a narrower projection made, the two weights' product."""
    for first in earlier:
        rank, width = first.weight.shape
        same = first.made is not None and first.made.data_ptr() == source.data_ptr()
        if same and rank == last.weight.shape[1] and rank < min(width, last.weight.shape[0]):
            weight = last.weight.float() @ first.weight.float()
            return last._replace(weight=weight, name=last.name or f"a product of two projections, of rank {rank}")
    return last


def projected(look: bool, weight: Tensor, out: Tensor, name: str = "") -> Product:
    """What a projection `[..., in] -> [..., out]` leaves behind; of its output only if the weights are looked at."""
    tokens = out.numel() // max(1, out.shape[-1])
    stride = max(1, tokens // 16) | 1  # odd: the rows fall on different positions of different sequences
    rows = out.detach().reshape(tokens, out.shape[-1])[::stride][:16].clone() if look else None
    made = out.detach() if look else None
    return Product(weight.detach(), out.shape[:-1], stride, rows, name, next(CLOCK), made)


def module_left(tap: Tap, frame: Frame, arguments: Any, output: Any) -> None:
    """A module inside the site is done: it may be a norm of the user's own, or a projection made of several."""
    if not tap.look or not isinstance(output, Tensor):
        return
    if _is_norm(frame, arguments, output):
        label, size = type(frame.module).__name__, _width(frame.module)
        tap.site.norms.append(Norm(label, repeatable(frame.module), size, False, next(CLOCK)))
    elif hasattr(frame.module, "get_delta_weight") and hasattr(frame.module, "get_base_layer"):
        name = f"{frame.name.rpartition('.')[2]} (base + low-rank update)"
        frame.products = [projected(tap.look, _updated(frame.module), output, name)]


def repeatable(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The forward of a norm layer that may be called again: of a copy, so that no buffer or counter of the model moves,
    and with the state of the random numbers put back."""
    # Tensors that stand for parameters, as sharded ones do while they are whole, are no leaves and refuse a deep copy.
    parts = [
        x
        for part in module.modules()
        for x in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
    ]
    copied = copy.deepcopy(module, {id(x): local(x).detach().clone() for x in parts if isinstance(x, Tensor)})

    def forward(x: Tensor) -> Tensor:
        devices = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            made: Tensor = copied.forward(x)
        return made

    return forward


def _updated(module: Any) -> Tensor:
    """`[out, in]` of a PEFT LoRA layer: its base weight and the active adapters' updates."""
    base = module.get_base_layer()
    weight: Tensor = base.weight.detach()
    if not (module.merged or module.disable_adapters):
        for adapter in module.active_adapters:
            if adapter in module.lora_A or adapter in module.lora_embedding_A:
                weight = weight + module.get_delta_weight(adapter).detach()
    return weight.t() if type(base).__name__ == "Conv1D" else weight


def _is_norm(frame: Frame, arguments: Any, output: Tensor) -> bool:
    """A user's own normalisation layer: named like one, no matrix, one tensor in and one of its shape out."""
    name = type(frame.module).__name__
    return (
        not (frame.owner and not is_leaf(frame.module))  # a gain a head is a matrix too
        and not hasattr(frame.module, "_get_fsdp_state")  # sharded by itself: its gain is in pieces again
        and not frame.products
        and bool(_NORM.search(name))
        and "dropout" not in name.lower()
        and len(arguments) == 1
        and isinstance(arguments[0], Tensor)
        and arguments[0].shape == output.shape
    )


def _width(module: nn.Module) -> int:
    """Features of a norm layer: the size of its gain, 0 when it has none."""
    return max((parameter.numel() for parameter in module.parameters(recurse=False)), default=0)


def layer_norm(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if tap.look:
        size = math.prod(bind(("input", "normalized_shape"), args, kwargs)["normalized_shape"])
        rest, named = args[1:], {key: value for key, value in kwargs.items() if key != "input"}
        tap.site.norms.append(Norm(func.__name__, lambda x: func(x, *rest, **named), size, True, next(CLOCK)))


def normalize(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = bind(("input", "p", "dim"), args, kwargs)
    dim = call.get("dim", 1)
    if tap.look and call.get("p", 2) == 2 and dim in (-1, out.dim() - 1):
        tap.site.norms.append(Norm("normalize", lambda x: F.normalize(x, dim=-1), out.shape[-1], True, next(CLOCK)))
