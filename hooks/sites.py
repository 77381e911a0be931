"""Which modules may hold attention, and what each is called.

Where attention really happens is seen while the model runs (tap.py). The names here say two things that running
cannot: that a model holds no attention at all, and that a module which looks like attention stayed unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType, ModuleType

import torch
from torch import nn

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Name parts that DDP, torch.compile, FSDP and checkpoint wrappers add; a layer keeps its name without them."""

_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
_QUERY = re.compile(
    r"^(w_?q|q|(to_)?q(uery)?(_?(proj|lin|linear))?|query_key_value|.*qkv.*|c_attn|in_proj_weight)$",
    re.IGNORECASE,
)
_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "softmax",
    "flex_attention",
    "observe",
}


def clean_name(name: str) -> str:
    """A module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_leaf(module: nn.Module) -> bool:
    """Whether it has no children. (They have no truth value: some have a length, a compiled one raises for it.)"""
    return next(module.children(), None) is None


def is_builtin_leaf(module: nn.Module) -> bool:
    """torch's own layers without children (Linear, LayerNorm, ...): no attention call starts in one."""
    return type(module).__module__.startswith("torch.nn.modules") and is_leaf(module)


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward may lead to attention, once each, with their clean names."""
    for name, module in model.named_modules():
        if not is_builtin_leaf(module) and not isinstance(module, torch.jit.ScriptModule):
            yield clean_name(name), module


def owners(model: nn.Module) -> set[str]:
    """Clean names of modules that hold a weight matrix: attention belongs to the innermost one that does."""
    found: set[str] = set()
    for name, shape in _shapes(model):
        if len(shape) >= 2:
            parts = clean_name(name).split(".")
            found.update(".".join(parts[:end]) for end in range(len(parts)))
    return found


def _shapes(model: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """Names and whole shapes of parameters, also where they are sharded outside of the forward."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # DeepSpeed's ZeRO-3 leaves an empty tensor, and the real shape beside it.
        yield name, getattr(parameter, "ds_shape", parameter.shape)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            # DDP over tensor parallelism (`device_mesh=`): after the first forward they are no parameters any more.
            if type(value).__name__ == "DTensor":
                yield f"{name}.{attribute}", value.shape
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)  # of FullyShardedDataParallel
        for inner, shape in zip(getattr(flat, "_fqns", ()), getattr(flat, "_shapes", ()), strict=True):
            yield f"{name}.{inner}", shape


def inside(name: str, other: str) -> bool:
    """Whether module `name` is `other` or lies inside it; the model itself is ""."""
    return not other or name == other or name.startswith(f"{other}.")


def module_of(layer: str) -> str:
    """Name of the module; further calls of attention in one are layers of their own, `NAME#1` and so on."""
    return re.sub("#[0-9]+$", "", layer)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to the model or to a part of it."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


def looks_like_attention(module: nn.Module) -> bool:
    """By class name, or by children or parameters that are named like query projections."""
    if isinstance(module, nn.MultiheadAttention) or _CLASS.search(type(module).__name__):
        return True
    names = [name for name, _ in module.named_children()]
    names += [name for name, _ in module.named_parameters(recurse=False)]
    return any(_QUERY.match(name) for name in names)


def expected_sites(model: nn.Module) -> list[str]:
    """Clean names of the innermost modules that look like attention and own weights."""
    owning = owners(model)
    called = [(name, module) for name, module in hookable(model) if not _only_holds(module)]
    names = [name for name, module in called if name in owning and looks_like_attention(module)]
    return [name for name in names if not any(name != other and inside(other, name) for other in names)]


def _only_holds(module: nn.Module) -> bool:
    """Whether it is a list or a dictionary of modules, whatever these are called, and is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def on_host(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def may_hold_attention(model: nn.Module) -> bool:
    """False only when neither a name nor the code of any module (and of what it calls) speaks of attention."""
    modules = [module for _, module in hookable(model)]
    return any(map(looks_like_attention, modules)) or any(
        _mentions_attention(function) for module in modules for function in _functions(module)
    )


def _functions(module: nn.Module) -> Iterator[object]:
    """The code of a module's own: methods of its classes, functions that were put into the object."""
    yield from vars(module).values()
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        yield from vars(kind).values()


def _mentions_attention(function: object, depth: int = 2) -> bool:
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):  # types describe theirs, and torch.ops has anything that it is asked for
        return False
    names = _names(code)
    if _CALLS & names:
        return True
    if depth == 0:
        return False
    scope = getattr(function, "__globals__", {})
    reached = [scope.get(name) for name in names]
    reached += [vars(part).get(name) for part in reached if isinstance(part, ModuleType) for name in names]
    return any(_mentions_attention(part, depth - 1) for part in reached)


def _names(code: CodeType) -> set[str]:
    """Names that the code uses, functions and comprehensions inside it included."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)
