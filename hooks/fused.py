"""The two fused calls: `F.scaled_dot_product_attention` and `F.multi_head_attention_forward`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.shapes import bind, form_of, four, four_mask
from attnwatch.hooks.tap import Seen, Tap


def sdpa(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call = bind(names, args, kwargs)
    q, k, v = (call[name].detach() for name in ("query", "key", "value"))
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
    form = form_of(tap.site, q, k)
    mask = call.get("attn_mask")
    attention = Attention(
        q=four(q, form),
        k=four(k, form),
        scale=call.get("scale"),
        causal=bool(call.get("is_causal", False)),
        mask=None if mask is None else four_mask(mask.detach(), form),
    )
    dropped = call.get("dropout_p", 0.0) > 0
    tap.report(Seen(attention, four(v, form), four(out.detach(), form), dropped=dropped, folded=form.folded))


_MHA = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def mha(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Everything inside is hidden from a function mode: q and k of the chosen sequences are computed again from the
    call's own arguments, in the caller's autocast, as the real ones were."""
    call = bind(_MHA, args, kwargs)
    query, key, value = (call[name].detach() for name in ("query", "key", "value"))
    output = out[0].detach()
    if query.dim() == 2:
        query, key, value, output = (x.unsqueeze(1) for x in (query, key, value, output))
    heads, keys, batch = call["num_heads"], key.shape[0], query.shape[1]
    chosen = tap.choose(batch)
    query, key, value, output = (x[:, chosen] for x in (query, key, value, output))
    if call.get("use_separate_proj_weight"):
        w_q, w_k, w_v = (call[f"{part}_proj_weight"].detach() for part in "qkv")
    else:
        w_q, w_k, w_v = call["in_proj_weight"].detach().chunk(3)
    bias = call.get("in_proj_bias")
    b_q, b_k, b_v = bias.detach().chunk(3) if bias is not None else (None, None, None)

    def split(x: Tensor, weight: Tensor, b: Tensor | None, extra: Tensor | None, zero: bool) -> Tensor:
        y = F.linear(x, weight, b)  # [T, B, E]
        if extra is not None:
            y = torch.cat([y, extra.detach().expand(1, y.shape[1], -1).to(y.dtype)])
        if zero:
            y = torch.cat([y, y.new_zeros(1, *y.shape[1:])])
        return y.view(*y.shape[:2], heads, -1).permute(1, 2, 0, 3)

    zero = bool(call.get("add_zero_attn"))
    q = split(query, w_q, b_q, None, False)
    k = split(key, w_k, b_k, call.get("bias_k"), zero)
    v = split(value, w_v, b_v, call.get("bias_v"), zero) if tap.look else None
    mask = _mask_of(call, batch, heads, keys, k.shape[2], chosen)
    attention = Attention(q=q, k=k, causal=mask is None and bool(call.get("is_causal")), mask=mask)
    projection = (call["out_proj_weight"].detach(), call.get("out_proj_bias"))
    named = (w_q.unflatten(0, (heads, -1)), w_k.unflatten(0, (heads, -1)))
    dropped = bool(call.get("training", True)) and call.get("dropout_p", 0.0) > 0
    tap.report(Seen(attention, v, output, projection, dropped, named, "weights named by the call"))


def _mask_of(call: dict[str, Any], batch: int, heads: int, keys: int, padded: int, chosen: list[int]) -> Tensor | None:
    """torch's two masks (True or -inf: *not* visible) as one: True where visible, or an addend if one is a float."""
    attn, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if call.get("is_causal") and padding is None and not call.get("need_weights", True):
        attn = None  # torch then takes its causal kernel and drops the mask
    parts: list[Tensor] = []
    if attn is not None:
        attn = attn.detach()
        parts.append(attn if attn.dim() == 2 else attn.reshape(batch, heads, *attn.shape[-2:])[chosen])
    if padding is not None:
        parts.append(padding.detach().reshape(batch, 1, 1, keys)[chosen])
    if not parts:
        return None
    parts = [F.pad(part, (0, padded - keys)) for part in parts]  # bias_k and the zero key are always visible
    if all(part.dtype == torch.bool for part in parts):
        return ~parts[0] if len(parts) == 1 else ~(parts[0] | parts[1])
    addends: list[Tensor] = [
        torch.zeros_like(part, dtype=torch.float32).masked_fill(part, -math.inf) if part.dtype == torch.bool else part
        for part in parts
    ]
    return addends[0] if len(addends) == 1 else addends[0] + addends[1]
