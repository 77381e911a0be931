"""The numbers of attention maps: pure functions, tensors in, one value a head out, computed block by block.

Nothing here reads a tensor's value on the host or touches a random state: it runs in the hooks of a model that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks.attention import Attention, check
from attnwatch.hooks.maps import Gram, Later, Pair, measure_block, ranks

BLOCK = 2**20
"""Most elements of one float32 temporary (4 MiB): sequences, heads, then rows are taken a block at a time."""


class Statistic(NamedTuple):
    """One number of a head. merge: "mean" (row-weighted), "max", "min", "sum", or "last" (from the weights)."""

    name: str
    unit: str
    help: str
    merge: str


ATTENTION: tuple[Statistic, ...] = (
    Statistic("logit_max", "1", "Largest attention logit that the softmax sees.", "max"),
    Statistic("logit_spread", "1", "Mean over rows of the largest minus the smallest visible logit.", "mean"),
    Statistic(
        "spread_ratio",
        "1",
        "Logit spread over the spread at which one key can take 99 % of a row; above 1 a row can saturate.",
        "mean",
    ),
    Statistic("entropy", "nat", "Mean entropy of the attention rows.", "mean"),
    Statistic(
        "entropy_ratio",
        "1",
        "Mean entropy over the entropy of uniform attention: 0 is one key a row, 1 is uniform.",
        "mean",
    ),
    Statistic("sink_mass", "1", "Attention that the most attended key takes, averaged over rows.", "mean"),
    Statistic(
        "first_key_mass",
        "1",
        "Attention that the first visible key of the sequence takes, averaged over rows.",
        "mean",
    ),
    Statistic("saturated_rows", "1", "Share of rows that give more than 99 % of their attention to one key.", "mean"),
    Statistic(
        "softmax_gradient",
        "1",
        "Share of gradient that the softmax lets through: 0 passes nothing, 1 is uniform attention.",
        "mean",
    ),
    Statistic(
        "map_rank",
        "directions",
        "Effective rank of the attention map of the measured rows, without the sink key's column.",
        "mean",
    ),
    Statistic(
        "forecast_sharpness",
        "1",
        "Upper bound on the largest attention weight of a row at the context length given, if the spread stays.",
        "mean",
    ),
    Statistic("tied_rows", "1", "Share of rows whose two largest logits are one number in the model's dtype.", "mean"),
    Statistic(
        "outlier_share",
        "1",
        "Share of the largest coordinate in the top key's product with the query, from 1/d to 1.",
        "mean",
    ),
    Statistic("query_norm_max", "1", "Largest L2 norm of a query.", "max"),
    Statistic("key_norm_max", "1", "Largest L2 norm of a visible key.", "max"),
    Statistic("qk_clip_factor", "1", "Factor that QK-Clip at 100 would put on the head's logits; 1 is none.", "min"),
    Statistic("nonfinite", "count", "Visible logits that are NaN or +inf.", "sum"),
)


def _runs() -> list[tuple[str, slice]]:
    """Neighbours in ATTENTION that merge alike, so that a merge is a few operations and not one a statistic."""
    runs, start = [], 0
    for kind, members in groupby(ATTENTION, key=lambda s: s.merge):
        stop = start + len(list(members))
        runs.append((kind, slice(start, stop)))
        start = stop
    return runs


_RUNS = _runs()
MAP_RANK = [s.name for s in ATTENTION].index("map_rank")
_MERGED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "sum": torch.add,
}  # fmt: skip


def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    context: int | None = None,
    rows: int | None = None,
) -> dict[str, Tensor]:
    """Every statistic of one attention call, by name: float32 `[H]`, NaN where undefined.

    q: `[B, H, Tq, d]`, k: `[B, Hk, Tk, d]`; the other arguments are those of `attnwatch.hooks.attention.Attention`.
    rows: at most so many rows of each sequence, evenly spread; None measures all, without holding a `Tq x Tk` map of a
    long sequence, except that `map_rank` takes evenly spaced rows, 1024 at most. Raises ValueError.
    """
    attention = Attention(q, k, scale, causal, window, mask, bias, softcap, sinks, context=context)
    check(attention)
    if rows is not None and rows < 1:
        raise ValueError(f"expected rows of at least 1; found {rows}: use None to measure every row")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        pair = measure(attention, list(range(attention.batch)), sample_rows(attention.queries, rows, 0.5))
        return dict(zip([s.name for s in ATTENTION], finish(pair).float().unbind(), strict=True))


def sample_rows(length: int, rows: int | None, phase: float) -> list[int]:
    """At most `rows` of `length` positions, evenly spread; `phase` in [0, 1) shifts them."""
    if rows is None or rows >= length:
        return list(range(length))
    return [int((i + phase) * length / rows) for i in range(rows)]


def sample_sequences(batch: int, sequences: int | None, turn: int) -> list[int]:
    """At most `sequences` of a batch, the next ones at each turn."""
    if sequences is None or sequences >= batch:
        return list(range(batch))
    return [(turn * sequences + i) % batch for i in range(sequences)]


def merge(a: Pair, b: Pair) -> Pair:
    """One pair of two measurements of the same heads."""
    values = [_MERGED[kind](a[0][s], b[0][s]) for kind, s in _RUNS]
    weights = [a[1][s] + b[1][s] if kind == "mean" else torch.maximum(a[1][s], b[1][s]) for kind, s in _RUNS]
    return torch.cat(values), torch.cat(weights)


def finish(pair: Pair) -> Tensor:
    """float64 `[len(ATTENTION), H]`: the statistics, NaN where nothing was measured."""
    values, weights = pair
    done = torch.cat([values[s] / weights[s] if kind == "mean" else values[s] for kind, s in _RUNS])
    return torch.where(weights > 0, done, torch.nan)


def measure(
    attention: Attention, sequences: Tensor | list[int], rows: Tensor | list[int], later: Later | None = None
) -> Pair:
    """Measures these rows of these sequences of one attention call; at least one of each.

    Tensors are int64, on the attention's device. Rows count as full, and the first key as first, by what all rows of
    the sequence see. Shapes are not checked here: `check` does. What `later` takes is for `add_ranks`: without it the
    host waits for the device.
    """
    later = Later(0) if later is None else later
    device = attention.device
    sequences, rows = placed(sequences, device), placed(rows, device)
    counts, first = attention.counts(sequences, BLOCK)
    visible = counts.index_select(-1, rows)
    full = full_rows(visible, counts)
    b, h, r = _block(attention, len(rows))
    pairs = []
    for start in range(0, attention.heads, h):
        heads = slice(start, min(start + h, attention.heads))
        pair: Pair | None = None
        for at in range(0, len(sequences), b):
            some = slice(at, at + b)
            n, whole, origin = (_of_heads(t[some], heads) for t in (visible, full, first))
            part = measure_block(attention, sequences[some], heads, rows, n, whole, origin, r, later)
            pair = part if pair is None else merge(pair, part)
        assert pair is not None
        pairs.append(pair)
    return torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs], 1)


def add_ranks(measured: Sequence[tuple[Pair, Sequence[Gram]]]) -> None:
    """Completes pairs, in place, by what `measure` left for later; all at once. The host waits for the device."""
    sums = iter(ranks([gram for _, grams in measured for gram in grams]))
    for (values, _), grams in measured:
        for gram in grams:
            values[MAP_RANK, gram.heads] += next(sums)


def full_rows(visible: Tensor, counts: Tensor) -> Tensor:
    """bool: rows that see 2 keys or more, and half as many as the row that sees the most. counts: of all rows."""
    return (visible >= 2) & (2 * visible >= counts.amax(-1, keepdim=True))


def placed(positions: Tensor | list[int], device: torch.device) -> Tensor:
    """int64 on the device; from pinned memory, as from any other the host would wait until the device has copied it."""
    if isinstance(positions, Tensor):
        return positions
    pinned = torch.tensor(positions, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _block(attention: Attention, rows: int) -> tuple[int, int, int]:
    """How many sequences, heads and rows make one block. Heads: whole groups of a key head, or an even part of one."""
    group = attention.heads // attention.kv_heads
    r = min(rows, max(1, BLOCK // max(attention.keys, attention.head_dim)))
    one = max(r * attention.keys, r * attention.head_dim, attention.keys * attention.head_dim)
    most = min(attention.heads, max(1, BLOCK // one))
    h = most // group * group if most >= group else max(n for n in range(1, most + 1) if group % n == 0)
    return max(1, BLOCK // (h * one)), h, r


def _of_heads(tensor: Tensor, heads: slice) -> Tensor:
    return tensor if tensor.shape[1] == 1 else tensor[:, heads]
