"""Adapters: a user's own attention layer, told in one small class. All methods are optional.

    class MyAttention:
        def match(self, name: str, module: nn.Module) -> bool: ...
        def weights(self, module) -> tuple[Tensor, Tensor, str]: ...     # W_q [H, d, in], W_k [Hk, d, in], a note
        def record(self, func, args, kwargs, out) -> attnwatch.Attention | None: ...

`match` says which modules it is for; without it, all that look like attention. `weights` is asked in the forward, where
sharded weights are whole. `record` is shown every torch function called in such a module and returns what an attention
call computed; for the others, and without it, the usual ways of seeing attention go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from attnwatch.hooks.sites import looks_like_attention
from attnwatch.hooks.tap import Seen, Tap


def adapter_for(adapters: Sequence[Any], name: str, module: nn.Module) -> Any:
    """The first adapter that matches a module, None if none does."""
    for adapter in adapters:
        match = getattr(adapter, "match", None)
        if looks_like_attention(module) if match is None else match(name, module):
            return adapter
    return None


def adapted(tap: Tap, handler: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Show a call to the site's adapter first."""
    record = getattr(tap.site.adapter, "record", None)
    attention = None if record is None else record(func, args, kwargs, out)
    if attention is not None:
        tap.report(Seen(attention))
    elif handler is not None:
        handler(tap, func, args, kwargs, out)
