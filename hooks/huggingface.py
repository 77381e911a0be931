"""Hugging Face transformers: every model of the interface fetches its attention function by one method, whatever runs
below it (eager, sdpa, flex, flash kernels). For a sampled step that method is wrapped; nothing is patched otherwise.

The call shows more than the kernel does: keys before they are repeated for grouped queries, soft-cap, learned sinks,
window, position bias. The arguments of the call decide, never an attribute of a config.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor

from attnwatch.hooks import flash
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.flex import block_mask_mod
from attnwatch.hooks.shapes import bind
from attnwatch.hooks.tap import Packed, Seen, Tap


class Interface:
    """`install` and `remove` the wrapper; `current()` is the running thread's tap, None outside a watched forward."""

    _installed: ClassVar[list[Interface]] = []  # of all models watched now: one wrapper serves them
    _original: ClassVar[Any] = None

    def __init__(self, current: Callable[[], Tap | None]):
        self._current = current

    def install(self) -> None:
        library: Any = sys.modules.get("transformers.modeling_utils")  # not imported: no model of it to see
        interface: Any = getattr(library, "AttentionInterface", None)
        original = getattr(interface, "get_interface", None)
        if original is None or self in Interface._installed:
            return
        Interface._installed.append(self)
        if len(Interface._installed) > 1:
            return

        @wraps(original)
        def get_interface(registry: Any, implementation: str, default: Any) -> Any:
            function = original(registry, implementation, default)
            for watching in Interface._installed:
                if watching._current() is not None:
                    function = watching._watched(function, str(implementation))
            return function

        Interface._original = original
        interface.get_interface = get_interface

    def remove(self) -> None:
        if self in Interface._installed:
            Interface._installed.remove(self)
            if not Interface._installed:
                sys.modules["transformers.modeling_utils"].AttentionInterface.get_interface = Interface._original

    def _watched(self, function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
        @wraps(function)
        def attend(*args: Any, **kwargs: Any) -> Any:
            tap = self._current()
            if tap is None:
                return function(*args, **kwargs)
            with tap.muted():  # what runs below is this same call
                out = function(*args, **kwargs)
            tap.handle(_record, function, implementation, args, kwargs, out)
            return out

        return attend


_FIRST = ("module", "query", "key", "value", "attention_mask")


def _record(tap: Tap, function: Any, implementation: str, args: Any, kwargs: Any, out: Any) -> None:
    names = (*_FIRST, *list(signature(function).parameters)[len(_FIRST) :])
    call = bind(names, args, kwargs)
    module, query, key, value = (call[name] for name in _FIRST[:4])
    visibility, packed = _visibility(module, implementation, query, key, call)
    attention = Attention(
        q=query.detach(),
        k=key.detach(),
        scale=call.get("scaling"),
        softcap=call.get("softcap"),
        bias=_detached(call.get("position_bias")),
        sinks=_detached(call.get("s_aux")),
        **visibility,
    )
    output = out[0].detach().transpose(1, 2)
    seen = Seen(attention, value.detach(), output, dropped=bool(call.get("dropout")), packed=packed)
    tap.report(seen, next((frame for frame in reversed(tap.frames) if frame.module is module), None))


def _visibility(
    module: Any, implementation: str, query: Tensor, key: Tensor, call: dict[str, Any]
) -> tuple[dict[str, Any], Packed | None]:
    """What tells which keys a row sees, by implementation: its own rules, as the library wrote them."""
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return {"mask": mask.detach()}, None
    if mask is not None and not isinstance(mask, Tensor):
        return {"mask_mod": block_mask_mod(mask)}, None
    if implementation == "eager":
        return {}, None
    causal = call.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and query.shape[2] > 1
    if "flash" in implementation:
        return _flash(query, key, mask, call, causal)
    return {"causal": causal and mask is None}, None


def _flash(
    query: Tensor, key: Tensor, mask: Tensor | None, call: dict[str, Any], causal: bool
) -> tuple[dict[str, Any], Packed | None]:
    """Flash kernels get no mask. Padding, `[B, T]`, is cut out of queries and keys; without it, packed sequences are
    told apart by their ends or, in a batch of one, by positions that start anew."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    window, positions = call.get("sliding_window"), call.get("position_ids")
    reach = -1 if window is None else window - 1
    band = flash.Band(causal, reach, reach)
    ends_q, ends_k = call.get("cu_seq_lens_q"), call.get("cu_seq_lens_k")
    document, by = None, "cu_seq_lens"
    visibility, mods = flash.whole(band, query, key)
    if mask is not None:
        shown = mask.detach().bool()
        visibility["mask"] = shown[:, None, None]
        mods.append(lambda b, h, i, j: shown[:, -queries:][b, i])
    elif isinstance(ends_q, Tensor) and isinstance(ends_k, Tensor):
        visibility = {}
        document, mods = flash.packed(band, (ends_q, ends_k), (batch, queries, keys))
    elif isinstance(positions, Tensor) and batch == 1 and positions.numel() == queries == keys > 1:
        started = document = (positions == positions.min()).view(1, -1).cumsum(-1)
        mods.append(lambda b, h, i, j: started[b, i] == started[b, j])
        by = "position_ids"
    visibility["mask_mod"] = flash.all_of(mods)
    return visibility, None if document is None else Packed(document, by)


def _detached(x: Any) -> Tensor | None:
    return x.detach() if isinstance(x, Tensor) else None
