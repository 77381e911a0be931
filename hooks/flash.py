"""flash-attn: the operators below `flash_attn_func` and `flash_attn_varlen_func`, and the rules of its kernels.

Kernels know causal and a window, both aligned at the last query and the last key. Sequences of different lengths lie
one behind the other, told apart by where they end.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.flex import Mod
from attnwatch.hooks.shapes import bind
from attnwatch.hooks.tap import Packed, Seen, Tap


class Band(NamedTuple):
    """Keys from `left` behind a row to `right` ahead of it, both included; -1: no end. causal: nothing ahead."""

    causal: bool
    left: int = -1
    right: int = -1

    def mods(self, to_end: tuple[Tensor, Tensor]) -> list[Mod]:
        """to_end: how far every query `[B, Tq]` and key `[B, Tk]` is from the end of its sequence."""
        queries, keys = to_end
        right = 0 if self.causal else self.right
        found: list[Mod] = []
        if right >= 0:
            found.append(lambda b, h, i, j: queries[b, i] - keys[b, j] <= right)
        if self.left >= 0:
            found.append(lambda b, h, i, j: keys[b, j] - queries[b, i] <= self.left)
        return found


def all_of(mods: list[Mod]) -> Mod | None:
    return (lambda *at: reduce(torch.logical_and, (mod(*at) for mod in mods))) if mods else None


def whole(band: Band, q: Tensor, k: Tensor) -> tuple[dict[str, Any], list[Mod]]:
    """Visibility in sequences `[B, H, T, d]` of one length: arguments of `Attention`, mask functions beside them."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if band.causal and queries == keys:
        return {"causal": True, "window": None if band.left < 0 else band.left + 1}, []
    ends = [torch.arange(n, 0, -1, device=q.device).expand(batch, -1) for n in (queries, keys)]
    return {}, band.mods((ends[0], ends[1]))


def packed(band: Band, ends: tuple[Tensor, Tensor], shape: tuple[int, int, int]) -> tuple[Tensor, list[Mod]]:
    """Visibility in sequences packed one behind the other. ends: where those of queries and keys end, `[n + 1]` from 0;
    shape: B, Tq, Tk, through which they run. Returns the sequence of every query, from 1, and mask functions."""
    batch, *lengths = shape
    document, to_end = [], []
    for end, length in zip(ends, lengths, strict=True):
        token = torch.arange(batch * length, device=end.device)
        which = torch.bucketize(token, end, right=True)
        document.append(which.view(batch, length))
        to_end.append((end[which.clamp(max=len(end) - 1)] - token).view(batch, length))
    of_query, of_key = document
    same: Mod = lambda b, h, i, j: of_query[b, i] == of_key[b, j]  # noqa: E731
    return of_query, [same, *band.mods((to_end[0], to_end[1]))]


_COMMON = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
_FORWARD = ("q", "k", "v", *_COMMON)
_VARLEN = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *_COMMON)


def forward(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """`flash_attn::_flash_attn_forward`: q `[B, Tq, H, d]`, k and v `[B, Tk, Hk, d]`."""
    if not str(func).startswith("flash_attn."):
        return  # version 3 has an operator of this name with other arguments
    call = bind(_FORWARD, args, kwargs)
    q, k, v, output = (x.detach().transpose(1, 2) for x in (call["q"], call["k"], call["v"], out[0]))
    visibility, mods = whole(_band(call), q, k)
    _report(tap, call, (q, k, v, output), visibility, mods, None)


def varlen_forward(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """`flash_attn::_flash_attn_varlen_forward`: q `[tokens, H, d]`, k and v `[tokens, Hk, d]`."""
    if not str(func).startswith("flash_attn."):
        return
    call = bind(_VARLEN, args, kwargs)
    q, k, v, output = (x.detach().transpose(0, 1)[None] for x in (call["q"], call["k"], call["v"], out[0]))
    ends = (call["cu_seqlens_q"], call["cu_seqlens_k"])
    document, mods = packed(_band(call), ends, (1, q.shape[2], k.shape[2]))
    _report(tap, call, (q, k, v, output), {}, mods, Packed(document, "cu_seqlens"))


def _band(call: dict[str, Any]) -> Band:
    return Band(bool(call["causal"]), call.get("window_size_left", -1), call.get("window_size_right", -1))


def _report(
    tap: Tap,
    call: dict[str, Any],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    visibility: dict[str, Any],
    mods: list[Mod],
    documents: Packed | None,
) -> None:
    q, k, v, output = tensors
    attention = Attention(
        q,
        k,
        scale=call["softmax_scale"],
        softcap=call.get("softcap") or None,
        mask_mod=all_of(mods),
        score_mod=_alibi(call.get("alibi_slopes"), k.shape[2] - q.shape[2]),
        **visibility,
    )
    tap.report(Seen(attention, v, output, dropped=call["dropout_p"] > 0, packed=documents))


def _alibi(slopes: Tensor | None, offset: int) -> Mod | None:
    """`[H]` or `[B, H]`. Within a packed sequence a constant offset drops out of the softmax."""
    if slopes is None:
        return None
    steep = slopes.detach()
    return lambda s, b, h, i, j: s - (steep[h] if steep.dim() == 1 else steep[b, h]) * (i + offset - j).abs()
