"""`flex_attention`: masks and scores as functions of batch, head, row and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.shapes import bind
from attnwatch.hooks.tap import Seen, Tap

Mod = Callable[..., Tensor]


def block_mask_mod(block_mask: Any) -> Mod | None:
    """The mask function of a BlockMask, `(b, h, i, j) -> bool`; None when it hides nothing (torch's own default).

    Below `flex_attention` the operator of the same name gets the BlockMask as a tuple, the function last."""
    mod: Mod | None = block_mask[-1] if isinstance(block_mask, tuple) else getattr(block_mask, "mask_mod", None)
    return None if mod is None or getattr(mod, "__name__", "") == "noop_mask" else mod


def flex_attention(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    names = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse")
    call = bind(names, args, kwargs)
    q, k, v = (call[name].detach() for name in names[:3])
    mask_mod = block_mask_mod(call.get("block_mask"))
    attention = Attention(q=q, k=k, scale=call.get("scale"), mask_mod=mask_mod, score_mod=call.get("score_mod"))
    output = out[0] if isinstance(out, tuple) else out
    tap.report(Seen(attention, v, output.detach()))
