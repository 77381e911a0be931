"""Forwards inside torch.func's transforms: their tensors are wrapped, have no memory to be known by, and end with them.

What `grad` wraps is looked at without its wrapping, and what `vmap` wraps not at all: it has a hidden dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map_only

_STACK = torch._C._functorch


def is_mapped() -> bool:
    """Whether torch.vmap runs."""
    stack = _STACK.get_interpreter_stack() or ()
    return any(level.key() == _STACK.TransformType.Vmap for level in stack)


def bare(x: Tensor) -> Tensor:
    """Without what transforms stand around it."""
    while _STACK.is_functorch_wrapped_tensor(x):
        x = _STACK.get_unwrapped(x)
    return x


@contextlib.contextmanager
def outside(call: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """These arguments without what transforms stand around them; operators meanwhile are not transformed."""
    if _STACK.peek_interpreter_stack() is None:
        yield call
    else:
        with temporarily_clear_interpreter_stack():
            yield tree_map_only(Tensor, bare, call)
