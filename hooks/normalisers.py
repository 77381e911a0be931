"""Entropy of every row from what a fused kernel keeps anyway: the logarithm of each row's normaliser.

With `l_i = log sum_j exp(s_ij)` and `s_ij = scale q_i . k_j` a row's entropy is `l_i - sum_j p_ij s_ij`, the sum
being `scale q_i` times what attention makes of the keys taken as values: one more call of the kernel, and no map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.maps import Pair
from attnwatch.hooks.statistics import ATTENTION, full_rows, placed

_NAMES = [s.name for s in ATTENTION]
_GIVEN = [_NAMES.index(name) for name in ("entropy", "entropy_ratio", "first_key_mass")]


def allows(attention: Attention) -> bool:
    """Whether the kernel can be called again: whole queries and keys, causal of a square or all visible, one scale."""
    a = attention
    altered = (a.mask, a.bias, a.softcap, a.sinks, a.scores, a.mask_mod, a.score_mod, a.window)
    return (
        a.q is not None
        and a.k is not None
        and all(x is None for x in altered)
        and not isinstance(a.scale, Tensor)
        and (not a.causal or a.queries == a.keys)
        and a.device.type in ("cpu", "cuda")
    )


def every_row(attention: Attention, sequences: Tensor | list[int], pair: Pair) -> Pair:
    """`pair` of some rows of these sequences, with entropy, entropy ratio and first-key mass of all of them: to 1e-5
    nat, at the cost of one forward of the attention in float32. As it is where the kernel cannot tell."""
    q, k = attention.q, attention.k
    if q is None or k is None or not allows(attention):
        return pair
    index = placed(sequences, attention.device)
    scale = attention.head_dim**-0.5 if attention.scale is None else float(attention.scale)
    counts = attention.counts(index, 1)[0]
    full = full_rows(counts, counts)
    sums = []
    for at in range(len(index)):
        queries, keys = (x.detach().index_select(0, index[at : at + 1]).float() for x in (q, k))
        keys = keys.repeat_interleave(attention.heads // attention.kv_heads, 1)
        mean, normaliser = _kernel(queries, keys, scale, attention.causal)
        entropy = (normaliser - scale * (queries * mean).sum(-1)).clamp(min=0)[0]
        first = (scale * (queries @ keys[:, :, :1].mT)[0, ..., 0] - normaliser[0]).exp()
        used = full[at] & entropy.isfinite()
        ratio = (entropy / counts[at].float().log()).clamp(max=1)
        rows = torch.stack([entropy, ratio, first, torch.ones_like(entropy)])
        sums.append(torch.where(used, rows, 0.0).sum(-1, dtype=torch.float64))
    *values, weight = sum(sums[1:], sums[0])
    whole = pair[0].clone(), pair[1].clone()
    for at, value in zip(_GIVEN, values, strict=True):
        whole[0][at], whole[1][at] = value, weight
    return whole


def _kernel(q: Tensor, k: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention's mean of the keys `[1, H, T, d]` and `l` `[1, H, T]`. On CUDA by the kernel that takes float32."""
    if q.device.type == "cuda":
        made = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, k, None, True, 0.0, causal, scale=scale)
        return made[0], made[1][..., : q.shape[2]]  # padded to a multiple of 32
    mean, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, causal, scale=scale)
    return mean, normaliser
