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
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers import modeling_flash_attention_utils as library
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo

WITH_SINKS = "kernels-community/vllm-flash-attn3"


@contextmanager
def flash_kernels() -> Iterator[None]:
    """While it lasts, `flash_attention_2`, and the kernel with sinks that gpt-oss asks for, run on any device."""
    available = {**modeling_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check": lambda: True}
    with (
        patch.object(modeling_falcon, "_flash_attention_forward", library._flash_attention_forward, create=True),
        patch.object(modeling_gpt_neo, "_flash_attention_forward", library._flash_attention_forward, create=True),
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
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """q: `[B, Tq, H, d]`, k and v: `[B, Tk, Hk, d]`. Causal and window are aligned bottom-right; both ends of the
    window are inclusive, and -1 is no end."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = (dropout_p, scale, causal, *window_size, softcap, alibi_slopes)
    if s_aux is not None:  # in another package, below another operator
        return _attend(q, k, v, *options, s_aux)
    out: Tensor = _Flash.apply(torch.ops.flash_attn._flash_attn_forward, _attend, q, k, v, *options)
    return out


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
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """q: `[tokens, H, d]`, k and v: `[tokens, Hk, d]`, sequences one behind the other."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ends = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    options = (dropout_p, scale, causal, *window_size, softcap, alibi_slopes)
    if s_aux is not None:
        return _attend_packed(q, k, v, *ends, *options, s_aux)
    out: Tensor = _Flash.apply(
        torch.ops.flash_attn._flash_attn_varlen_forward, _attend_packed, q, k, v, *ends, *options
    )
    return out


class _Flash(torch.autograd.Function):
    """The operator forward, as flash-attn calls it; plain torch backward."""

    @staticmethod
    def forward(ctx: Any, operator: Any, plain: Any, *arguments: Any) -> Tensor:
        ctx.plain, ctx.arguments = plain, arguments
        out: Tensor = operator(*arguments)[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.arguments[:3]]
            grads = torch.autograd.grad(ctx.plain(*inputs, *ctx.arguments[3:]), inputs, grad)
        return (None, None, *grads, *(None for _ in ctx.arguments[3:]))


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _attend(q, k, v, *options).contiguous(), q.new_zeros(0)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _attend_packed(q, k, v, *ends, *options), q.new_zeros(0)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    slopes: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    behind = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    if slopes is not None:
        scores = scores - slopes[..., None, None] * behind.abs()
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= behind > left
    if causal or right >= 0:
        hidden |= -behind > (0 if causal else right)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    maps = torch.dropout(scores.softmax(-1), dropout_p, train=True)[..., :keys]
    return (maps @ v).transpose(1, 2)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int, *options: Any
) -> Tensor:
    bounds = zip(ends_q.tolist(), ends_q.tolist()[1:], ends_k.tolist(), ends_k.tolist()[1:], strict=False)
    return torch.cat([_attend(q[None, a:b], k[None, c:d], v[None, c:d], *options)[0] for a, b, c, d in bounds])
