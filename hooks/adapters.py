"""Adapters: a user's own attention layer, told in one small class. All methods are optional.

    class MyAttention:
        def match(self, name: str, module: nn.Module) -> bool: ...
        def weights(self, module) -> tuple[Tensor, Tensor, str]: ...     # W_q [H, d, in], W_k [Hk, d, in], a note
        def record(self, func, args, kwargs, out) -> attnwatch.Attention | None: ...

`match` says which modules it is for; without it, all that look like attention. `weights` is asked in the forward, where
sharded weights are whole, and believed. `record` is shown every torch function called in such a module and returns what
an attention call computed; where it returns None, and without it, the usual ways of seeing attention go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.attention import check as check_attention
from attnwatch.hooks.sites import looks_like_attention
from attnwatch.hooks.tap import Seen, Tap

METHODS = ("match", "weights", "record")


def check(adapters: Sequence[Any], modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ValueError, one line, for what is no adapter, or whose `match` fails for one of the modules."""
    if not isinstance(adapters, list | tuple):
        raise ValueError(f"expected adapters to be a list, found {repr(adapters)[:60]}: put it into one")
    for adapter in adapters:
        if not any(callable(getattr(adapter, method, None)) for method in METHODS):
            raise ValueError(
                f"expected adapters with a method {', '.join(METHODS[:-1])} or {METHODS[-1]}; "
                f"found {repr(adapter)[:60]}, which has none of them"
            )
    for name, module in modules:
        try:
            adapter_for(adapters, name, module)
        except Exception as error:
            raise ValueError(
                f"expected every adapter's match(name, module) to answer; for {name!r} ({type(module).__name__}) "
                f"one raised {type(error).__name__}: {error}"
            ) from error


def adapter_for(adapters: Sequence[Any], name: str, module: nn.Module) -> Any:
    """The first adapter that matches a module, None if none does."""
    for adapter in adapters:
        match = getattr(adapter, "match", None)
        if looks_like_attention(module) if match is None else match(name, module):
            return adapter
    return None


def given_weights(adapter: Any, module: nn.Module, attention: Attention) -> tuple[tuple[Tensor, Tensor], str]:
    """W_q `[H, d, in]`, W_k `[Hk, d, in]` and a note, as the adapter gives them. Raises ValueError, one line."""
    w_q, w_k, note = adapter.weights(module)
    heads = attention.heads
    if not (w_q.dim() == w_k.dim() == 3 and w_q.shape[0] == heads and heads % w_k.shape[0] == 0) or (
        w_q.shape[1] != w_k.shape[1]
    ):
        raise ValueError(
            f"expected weights() to give W_q [{heads}, d, in] and W_k [kv heads, d, in]; "
            f"found {list(w_q.shape)} and {list(w_k.shape)}: unflatten the rows of a projection into heads"
        )
    return (w_q, w_k), note or "weights as the adapter gives them"


def adapted(tap: Tap, handler: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Show a call to the site's adapter first."""
    record = getattr(tap.site.adapter, "record", None)
    attention = None if record is None else record(func, args, kwargs, out)
    if attention is not None:
        check_attention(attention)
        tap.report(Seen(attention))
    elif handler is not None:
        handler(tap, func, args, kwargs, out)
