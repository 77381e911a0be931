"""Hugging Face transformers: every model of the interface fetches its attention function by one method, whatever runs
below it (eager, sdpa, flex, flash kernels). For a sampled step that method is wrapped; nothing is patched otherwise.

The call shows more than the kernel does: keys before they are repeated for grouped queries, soft-cap, learned sinks,
window, position bias. The arguments of the call decide, never an attribute of a config.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.flex import block_mask_mod
from attnwatch.hooks.tap import Seen, Tap


class Interface:
    """`install` and `remove` the wrapper; `current()` is the tap of the running thread, None outside a watched forward."""

    def __init__(self, current: Callable[[], Tap | None]):
        self._current = current
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        library = sys.modules.get("transformers.modeling_utils")  # not imported: no model of it to see
        interface = getattr(library, "AttentionInterface", None)
        original = getattr(interface, "get_interface", None)
        if original is None:
            return

        @functools.wraps(original)
        def get_interface(registry: Any, implementation: str, default: Any) -> Any:
            function = original(registry, implementation, default)
            return self._watched(function, str(implementation)) if self._current() is not None else function

        self._original = original
        interface.get_interface = get_interface

    def remove(self) -> None:
        if self._original is not None:
            sys.modules["transformers.modeling_utils"].AttentionInterface.get_interface = self._original  # type: ignore[attr-defined]
            self._original = None

    def _watched(self, function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            tap = self._current()
            if tap is None:
                return function(module, query, key, value, mask, *args, **kwargs)
            with tap.muted():  # what runs below is this same call
                out = function(module, query, key, value, mask, *args, **kwargs)
            tap.handle(_record, module, implementation, (query, key, value, mask), kwargs, out)
            return out

        return attend


def _record(
    tap: Tap, module: Any, implementation: str, tensors: tuple[Any, Any, Any, Any], kwargs: dict[str, Any], out: Any
) -> None:
    query, key, value, mask = tensors
    attention = Attention(
        q=query.detach(),
        k=key.detach(),
        scale=kwargs.get("scaling"),
        softcap=kwargs.get("softcap"),
        bias=_detached(kwargs.get("position_bias")),
        sinks=_detached(kwargs.get("s_aux")),
        **_visibility(module, implementation, query, mask, kwargs),
    )
    seen = Seen(attention, value.detach(), out[0].detach().transpose(1, 2), dropped=bool(kwargs.get("dropout")))
    tap.report(seen, next((frame for frame in reversed(tap.frames) if frame.module is module), None))


def _visibility(module: Any, implementation: str, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What tells which keys a row sees, by implementation: its own rules, as the library wrote them."""
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return {"mask": mask.detach()}
    if mask is not None and not isinstance(mask, Tensor):
        return {"mask_mod": block_mask_mod(mask)}
    if implementation == "eager":
        return {}
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and query.shape[2] > 1
    if "flash" not in implementation:
        return {"causal": causal and mask is None}
    padding = None if mask is None else mask.detach().bool()[:, None, None]
    window, positions = kwargs.get("sliding_window"), kwargs.get("position_ids")
    mods = []
    if window is not None and not causal:  # the kernel's window then reaches both ways
        mods.append(lambda b, h, i, j: (i - j).abs() < window)
        window = None
    if mask is None and isinstance(positions, Tensor) and positions.dim() == 2:
        mods.append(_same_document(positions.detach().expand(query.shape[0], -1)))
    return {"causal": causal, "window": window, "mask": padding, "mask_mod": _all(mods)}


def _same_document(positions: Tensor) -> Callable[..., Tensor]:
    """Packed sequences without a mask: a document starts wherever the positions do not go on. `positions [B, T]`."""
    jumps = torch.nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0))
    document = jumps.cumsum(-1)
    return lambda b, h, i, j: document[b, i] == document[b, j]


def _all(mods: list[Callable[..., Tensor]]) -> Callable[..., Tensor] | None:
    if len(mods) == 2:
        first, second = mods
        return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)
    return mods[0] if mods else None


def _detached(x: Any) -> Tensor | None:
    return x.detach() if isinstance(x, Tensor) else None
