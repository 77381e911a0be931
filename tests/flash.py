"""A stand-in for flash-attn's kernels, which need a GPU: the same functions, in plain torch.

Everything around the kernels stays the library's own: unpadding by the 2-D mask, packing by `position_ids` or
`cu_seq_lens`, which arguments reach the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tests import vision as vision  # before transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils as library
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

WITH_SINKS = "kernels-community/vllm-flash-attn3"


@contextmanager
def flash_kernels() -> Iterator[None]:
    """While it lasts, `flash_attention_2`, and the kernel with learned sinks that gpt-oss asks for, run on any device."""
    available = {**modeling_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check": lambda: True}
    with (
        patch.object(library, "_lazy_imports", _kernels),
        patch.object(library, "_loaded_implementation", None),
        patch.dict(modeling_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX, {2: available}),
        # What the library does once it has fetched a kernel:
        patch.dict(AttentionInterface._global_mapping, {WITH_SINKS: flash_attention_forward}),
        patch.dict(AttentionMaskInterface._global_mapping, {WITH_SINKS: flash_attention_mask}),
    ):
        yield


def _kernels(*_: Any, **__: Any) -> tuple[Any, ...]:
    return flash_attn_func, flash_attn_varlen_func, None, library._pad_input, library._unpad_input


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """q: `[B, Tq, H, d]`, k and v: `[B, Tk, Hk, d]`. Causal and window are aligned bottom-right; both ends of the
    window are inclusive, and -1 is no end."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    left, right = window_size
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if causal or right >= 0:
        hidden |= -distance > (0 if causal else right)
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    maps = torch.dropout(scores.softmax(-1), dropout_p, train=True)[..., :keys]
    return (maps @ v).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """q: `[tokens, H, d]`, k and v: `[tokens, Hk, d]`, sequences one behind the other."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], *options)[0]
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    ]
    return torch.cat(parts)
