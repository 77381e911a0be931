"""What a seen torch function means: projections, norms, and the three ways attention is called.

A handler gets the tap, the function, its arguments and its result, under `no_grad`, and must not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.tap import KEPT, Frame, Norm, Pair, Product, Seen, Tap

HIDDEN = -9999.0
"""Hand-written masks add or fill with -1e4, -1e9, -inf or the dtype's minimum: anything lower hides a key."""


def _bind(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


# --- projections and norms: only looked at when the weights are ---------------------------------------------------------


def _linear(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = _bind(("input", "weight"), args, kwargs)
    _product(tap, call["weight"], out)


def _addmm(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = _bind(("input", "mat1", "mat2"), args, kwargs)
    _product(tap, call["mat2"].t(), out)


def _product(tap: Tap, weight: Tensor, out: Tensor) -> None:
    tokens = out.numel() // max(1, out.shape[-1])
    stride = max(1, tokens // 16) | 1  # odd: the rows fall on different positions of different sequences
    rows = out.detach().reshape(tokens, -1)[::stride][:16].clone() if tap.look else None
    products = tap.site.products
    products.append(Product(weight.detach(), out.shape[:-1], stride, rows))
    del products[:-KEPT]


def _layer_norm(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if tap.look:
        size = math.prod(_bind(("input", "normalized_shape"), args, kwargs)["normalized_shape"])
        rest, named = args[1:], {key: value for key, value in kwargs.items() if key != "input"}
        tap.site.norms.append(Norm(func.__name__, lambda x: func(x, *rest, **named), size, True))


def _normalize(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = _bind(("input", "p", "dim"), args, kwargs)
    dim = call.get("dim", 1)
    if tap.look and call.get("p", 2) == 2 and dim in (-1, out.dim() - 1):
        tap.site.norms.append(Norm("normalize", lambda x: F.normalize(x, dim=-1), out.shape[-1], True))


# --- hand-written attention: a product of two activations, masks, a softmax ------------------------------------------------


def _matmul(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if not isinstance(out, Tensor):
        return
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if len(operands) < 2:
        return
    a, b = operands[-2:]  # baddbmm and addmm name the addend first
    if b.dim() == 2:
        if a.dim() >= 2 and a.shape[-1] == b.shape[0]:
            _product(tap, b.t(), out)
    elif a.dim() >= 3 and b.dim() >= 3:
        _pair(tap, a, b.transpose(-1, -2), out)


def _einsum(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """`bhid,bhjd->bhij` in any letters: one letter summed, the last two of the result are rows and keys."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    equation = str(args[0]).replace(" ", "")
    if len(operands) != 2 or equation.count("->") != 1 or "." in equation:
        return
    inputs, result = equation.split("->")
    first, second = inputs.split(",")
    summed = [c for c in first if c in second and c not in result]
    if len(summed) != 1 or len(result) < 3 or result[-1] in first or result[-2] in second:
        return
    row, key, lead = result[-2], result[-1], result[:-2]
    if row not in first or key not in second:
        return

    def ordered(labels: str, x: Tensor, last: str) -> Tensor:
        kept = [c for c in lead if c in labels]
        x = x.permute(*[labels.index(c) for c in (*kept, last, summed[0])])
        for position, c in enumerate(lead):
            if c not in labels:
                x = x.unsqueeze(position)
        return x

    if len(set(first)) == len(first) and len(first) <= len(result) and len(second) <= len(result):
        _pair(tap, ordered(first, operands[0], row), ordered(second, operands[1], key), out)


def _pair(tap: Tap, q: Tensor, k: Tensor, out: Tensor) -> None:
    site = tap.site
    site.pairs = [*site.pairs[-3:], Pair(q.detach(), k.detach(), out.shape)]
    site.visible.clear()


def _hides(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and value <= HIDDEN)


def _is_scores(site: Frame, x: Any) -> bool:
    return (
        bool(site.pairs)
        and isinstance(x, Tensor)
        and x.numel() == site.pairs[-1].shape.numel()
        and x.shape[-2:] == site.pairs[-1].shape[-2:]
    )


def _masked_fill(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = _bind(("input", "mask", "value"), args, kwargs)
    if _is_scores(tap.site, out) and _hides(call["value"]):
        tap.site.visible.append(~call["mask"].detach())


def _where(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = _bind(("condition", "input", "other"), args, kwargs)
    if "input" not in call or not _is_scores(tap.site, out):
        return
    condition = call["condition"].detach()
    if _is_scores(tap.site, call["input"]) and _hides(call["other"]):
        tap.site.visible.append(condition)
    elif _is_scores(tap.site, call["other"]) and _hides(call["input"]):
        tap.site.visible.append(~condition)


def _add(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A float mask is an addend that learns nothing; a learned bias is not a mask."""
    if _is_scores(tap.site, out):
        for addend in args[:2]:
            if isinstance(addend, Tensor) and not addend.requires_grad and addend.is_floating_point():
                tap.site.visible.append(addend.detach() > HIDDEN)


def _softmax(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    call = _bind(("input", "dim"), args, kwargs)
    x, dim, site = call["input"], call.get("dim"), tap.site
    if not isinstance(out, Tensor) or out.dim() < 3 or dim not in (-1, out.dim() - 1):
        return
    pair = next(
        (p for p in reversed(site.pairs) if p.shape[-2:] == x.shape[-2:] and p.shape.numel() == x.numel()),
        None,
    )
    if pair is None:
        return  # a router, a classifier: no product of two activations behind it
    batch, folded = _batch(site, x)
    grouped = x.dim() == 5 and pair.k.shape[2] == 1
    scores = _four(x.detach(), batch, grouped)
    mask = None
    for visible in site.visible:
        part = _four_mask(visible, batch, scores.shape[1], grouped)
        mask = part if mask is None else mask & part
    q, k = _four(pair.q, batch, grouped), _four(pair.k, batch, grouped)
    site.pairs.clear()
    site.visible.clear()
    tap.report(Seen(Attention(q=q, k=k, scores=scores, mask=mask), folded=folded))


def _batch(site: Frame, x: Tensor) -> tuple[int, bool]:
    """Sequences in a tensor whose first dimension may be sequences * heads, and whether that could not be told.

    A projection of the same module knows how many tokens there are: tokens / rows = sequences."""
    if x.dim() != 3:
        return 0, False
    for product in site.products:
        batch, rest = divmod(product.tokens, x.shape[-2])
        if not rest and batch and x.shape[0] % batch == 0:
            return batch, False
    return x.shape[0], True


def _four(x: Tensor, batch: int, grouped: bool = False) -> Tensor:
    """To `[B, H, T, d]`. 3-D: sequences * heads are folded. 5-D: `[B, Hk, group, T, d]` if grouped, else windows join B."""
    if x.dim() == 3:
        return x.reshape(batch, -1, *x.shape[1:])
    if x.dim() == 5 and grouped:
        return x.flatten(1, 2)
    return x.flatten(0, -4) if x.dim() > 4 else x


def _four_mask(mask: Tensor, batch: int, heads: int, grouped: bool = False) -> Tensor:
    if mask.dim() == 3 and batch:
        return mask.reshape(batch, -1, *mask.shape[1:]) if mask.shape[0] == batch * heads else mask.unsqueeze(1)
    if mask.dim() == 5 and grouped:
        return (
            mask.expand(-1, -1, max(1, heads // mask.shape[1]), -1, -1).flatten(1, 2)
            if mask.shape[1] > 1
            else mask[:, :, 0]
        )
    return mask.flatten(0, -4) if mask.dim() > 4 else mask


# --- the fused calls ------------------------------------------------------------------------------------------------------


def _sdpa(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call = _bind(names, args, kwargs)
    q, k, v, mask = (
        call["query"].detach(),
        call["key"].detach(),
        call["value"].detach(),
        call.get("attn_mask"),
    )
    batch, folded = _batch(tap.site, q)
    if mask is not None:
        heads = q.shape[0] // batch if batch else q.shape[-3]
        mask = _four_mask(mask.detach(), batch, heads)
    attention = Attention(
        q=_four(q, batch),
        k=_four(k, batch),
        scale=call.get("scale"),
        causal=bool(call.get("is_causal", False)),
        mask=mask,
    )
    dropped = call.get("dropout_p", 0.0) > 0
    tap.report(Seen(attention, _four(v, batch), _four(out.detach(), batch), dropped=dropped, folded=folded))


_MHA = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def _mha(tap: Tap, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Everything inside is hidden from a function mode: q and k of the chosen sequences are computed again from the
    call's own arguments, in the caller's autocast, as the real ones were."""
    call = _bind(_MHA, args, kwargs)
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
        return y.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    zero = bool(call.get("add_zero_attn"))
    q = split(query, w_q, b_q, None, False)
    k = split(key, w_k, b_k, call.get("bias_k"), zero)
    v = split(value, w_v, b_v, call.get("bias_v"), zero) if tap.look else None
    mask = _mha_mask(call, batch, heads, keys, k.shape[2], chosen)
    attention = Attention(q=q, k=k, causal=mask is None and bool(call.get("is_causal")), mask=mask)
    projection = (call["out_proj_weight"].detach(), call.get("out_proj_bias"))
    dropped = bool(call.get("training", True)) and call.get("dropout_p", 0.0) > 0
    tap.report(Seen(attention, v, output, projection, dropped, (w_q, w_k)))


def _mha_mask(call: dict[str, Any], batch: int, heads: int, keys: int, padded: int, chosen: list[int]) -> Tensor | None:
    """torch's two masks (True or -inf: *not* visible) as one: True where visible if both are boolean, else an addend."""
    attn, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if call.get("is_causal") and padding is None and not call.get("need_weights", True):
        attn = None  # torch then takes its causal kernel and drops the mask
    parts = []
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
    addends = [
        torch.zeros_like(part, dtype=torch.float32).masked_fill(part, -math.inf) if part.dtype == torch.bool else part
        for part in parts
    ]
    return addends[0] if len(addends) == 1 else addends[0] + addends[1]


HANDLERS: dict[str, Callable[[Tap, Any, Any, Any, Any], None]] = {
    "scaled_dot_product_attention": _sdpa,
    "multi_head_attention_forward": _mha,
    "softmax": _softmax,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "baddbmm": _matmul,
    "einsum": _einsum,
    "linear": _linear,
    "addmm": _addmm,
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "normalize": _normalize,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill,
    "where": _where,
    "add": _add,
    "add_": _add,
    "__add__": _add,
    "__iadd__": _add,
    "__radd__": _add,
}
