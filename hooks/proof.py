"""Proofs that a call was understood: vectors compared whatever their rotation, the layer's own output made again."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.tap import Seen


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error of a proof. Wrong layouts err by 0.2 and more; half precision rounds by 2**-8 a step."""
    return 5e-2 if dtype in (torch.float16, torch.bfloat16) else 2e-3


def token_rows(x: Tensor, stride: int, count: int, sequence_first: bool) -> tuple[Tensor, Tensor]:
    """The tokens 0, stride, 2 * stride, ... of `x [B, H, T, d]` as `[n, H, d]`, and the position of each."""
    batch, length = x.shape[0], x.shape[2]
    flat = torch.arange(count, device=x.device) * stride
    b, t = (flat % batch, flat // batch) if sequence_first else (flat // length, flat % length)
    return x[b, :, t].float(), t


def mismatch(real: Tensor, made: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """How far `made [n, Hx, d]`, up to a rotary embedding and a constant a head, is from `real [n, H, d]`.

    Rotary embeddings turn pairs of coordinates, (i, i + d/2) or (2i, 2i + 1), and leave position 0 as it is: lengths of
    pairs, the coordinates themselves, those at position 0, and the whole vector's length are compared. The length is
    judged against its own variation from token to token: after a query-key norm it has none and proves nothing.

    Returns the smallest relative error `[]` and the constants `[H]` (real / made).
    """
    heads, d = real.shape[1:]
    if made.shape[1] != heads:
        made = made.repeat_interleave(heads // made.shape[1], dim=1)
    first = (position == 0).float()[:, None, None]
    views: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x * first]
    if d % 2 == 0 and d > 2:  # a pair that is the whole vector has the length that a norm gave it
        views += [
            lambda x: torch.hypot(x[..., : d // 2], x[..., d // 2 :]),
            lambda x: torch.hypot(x[..., 0::2], x[..., 1::2]),
        ]
    errors, ratios = [], []
    for view in views:
        a, b = view(real), view(made)
        error, ratio = _fit(a, b, a.square().sum())
        errors.append(error)
        ratios.append(ratio)
    a, b = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (real, made))
    errors[1] = torch.maximum(errors[1], _fit(a, b, a.square().sum())[0])  # position 0 alone proves little: lengths too
    error, ratio = _fit(a, b, (a - a.mean(0)).square().sum())
    best = torch.stack([*errors, error]).nan_to_num(nan=torch.inf)
    least, which = best.min(0)
    return least, torch.stack([*ratios, ratio]).index_select(0, which[None])[0]


def _fit(real: Tensor, made: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    ratio = (real * made).sum((0, 2)) / made.square().sum((0, 2)).clamp_min(1e-30)  # [H], least squares
    error = (real - ratio[:, None] * made).square().sum()
    return (error / scale).sqrt(), ratio  # NaN where nothing is there to compare


def reconstruct(seen: Seen) -> Tensor:
    """Relative error `[]` of softmax(logits) V against what the layer returned, for some rows of one sequence."""
    attention, value, output = seen.attention, seen.value, seen.output
    assert value is not None
    assert output is not None
    rows = _some_rows(attention)
    logits, visible = _logits(attention, rows)  # [1, H, R, Tk]
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    if attention.sinks is not None:
        sink = attention.sinks.detach().float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    v = value[:1].float()
    v = v.repeat_interleave(attention.heads // v.shape[1], dim=1)
    made = logits.softmax(-1)[..., : v.shape[2]] @ v  # [1, H, R, dv]
    real = output[:, 0] if seen.projection is not None else output[0]
    if seen.projection is not None:
        weight, bias = seen.projection
        made = F.linear(made[0].transpose(0, 1).flatten(1), weight.float(), None if bias is None else bias.float())
        real = real[rows].float()
    else:
        real = real[:, rows].float()
    if visible is not None:  # a row of a head that sees nothing: what the model makes of it is not to be foretold
        blind = ~visible.any(-1).expand(1, attention.heads, -1)[0]  # [H, R]
        some = blind.any(0)[:, None] if seen.projection is not None else blind[..., None]
        made, real = made.masked_fill(some, 0.0), real.masked_fill(some, 0.0)
    made, real = made.nan_to_num(), real.nan_to_num()  # a run that diverged is not misunderstood for that
    return ((real - made).square().sum() / real.square().sum().clamp_min(1e-30)).sqrt()


def score_scale(attention: Attention) -> tuple[Tensor, Tensor]:
    """Hand-written attention: how well `c q.k` explains the scores (relative error `[]`), and the constant c `[H]`.

    Some rows of one sequence, visible entries. A position bias leaves an error: the scores are right all the same.
    """
    q, k = attention.q, attention.k
    assert q is not None
    assert k is not None
    rows = _some_rows(attention)
    scores, visible = _logits(attention, rows)
    raw = q[:1, :, rows].float() @ k[:1].float().repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    if visible is not None:
        raw, scores = raw.masked_fill(~visible, 0.0), scores.masked_fill(~visible, 0.0)
    ratio = (raw * scores).sum((0, 2, 3)) / raw.square().sum((0, 2, 3)).clamp_min(1e-30)
    error = (scores - ratio[:, None, None] * raw).square().sum() / scores.square().sum().clamp_min(1e-30)
    return error.sqrt(), ratio


def _some_rows(attention: Attention, count: int = 8) -> Tensor:
    return torch.linspace(0, attention.queries - 1, min(count, attention.queries), device=attention.device).long()


def _logits(attention: Attention, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """All heads of the first sequence: logits `[1, H, R, Tk]` and what is visible."""
    first, heads = rows[:1] * 0, slice(0, attention.heads)
    logits = attention.logits(
        attention.query_block(first, heads, rows), attention.key_block(first, heads), first, heads, rows
    )
    return logits, attention.visible(first, heads, rows)
