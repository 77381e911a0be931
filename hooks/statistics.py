"""The numbers of attention maps: pure functions, tensors in, one value a head out, computed block by block.

Nothing here waits for the device, reads a tensor's value on the host, or touches a random state: it runs in the hooks
of a model that trains. (One exception is torch's own: on CUDA, `torch.linalg.eigvalsh` waits to check for errors.)
"""

from __future__ import annotations

from itertools import groupby
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks.attention import Attention, check

BLOCK = 2**20
"""Most elements of one float32 temporary (4 MiB): sequences, heads, then rows are taken a block at a time."""

RANK_ROWS = 1024
"""Most rows that one sequence gives to `map_rank`: its cost grows with their third power."""

SATURATED = 0.99
INF = float("inf")
HUGE = torch.finfo(torch.float32).max
LOW = -HUGE / 2  # stands for a hidden logit: unlike -inf, 0 * LOW is 0


class Statistic(NamedTuple):
    """One number of a head. merge: "mean" (row-weighted), "max", "sum", or "last" (from the weights)."""

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
    Statistic("query_norm_max", "1", "Largest L2 norm of a query.", "max"),
    Statistic("key_norm_max", "1", "Largest L2 norm of a visible key.", "max"),
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

Pair = tuple[Tensor, Tensor]
"""Values and weights, float64 `[len(ATTENTION), H]` each, that merge over sequences, micro-batches and ranks.

mean: the weighted sum and its weight; max: the largest (-inf with weight 0: none) and 1; sum: the sum and 1.
"""


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
    rows: int | None = None,
) -> dict[str, Tensor]:
    """Every statistic of one attention call, by name: float32 `[H]`, NaN where undefined.

    q: `[B, H, Tq, d]`, k: `[B, Hk, Tk, d]`; the other arguments are those of `attnwatch.hooks.attention.Attention`.
    rows: at most so many rows of each sequence, evenly spread; None measures all, without holding a `Tq x Tk` map of a
    long sequence, except that `map_rank` takes evenly spaced rows, at most `RANK_ROWS`. Raises ValueError.
    """
    attention = Attention(q, k, scale, causal, window, mask, bias, softcap, sinks)
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
    values = [torch.maximum(a[0][s], b[0][s]) if kind == "max" else a[0][s] + b[0][s] for kind, s in _RUNS]
    weights = [a[1][s] + b[1][s] if kind == "mean" else torch.maximum(a[1][s], b[1][s]) for kind, s in _RUNS]
    return torch.cat(values), torch.cat(weights)


def finish(pair: Pair) -> Tensor:
    """float64 `[len(ATTENTION), H]`: the statistics, NaN where nothing was measured."""
    values, weights = pair
    done = torch.cat([values[s] / weights[s] if kind == "mean" else values[s] for kind, s in _RUNS])
    return torch.where(weights > 0, done, torch.nan)


def measure(attention: Attention, sequences: Tensor | list[int], rows: Tensor | list[int]) -> Pair:
    """Measures these rows of these sequences of one attention call; at least one of each.

    Tensors (int64, on the attention's device) spare a copy to the device. Rows count as full, and the first key as
    first, by what all rows of the sequence see. Shapes are not checked here: `check` does.
    """
    device = attention.device
    sequences = torch.as_tensor(sequences, dtype=torch.int64, device=device)
    rows = torch.as_tensor(rows, dtype=torch.int64, device=device)
    counts, first = attention.counts(sequences, BLOCK)
    visible = counts.index_select(-1, rows)
    full = (visible >= 2) & (2 * visible >= counts.amax(-1, keepdim=True))
    b, h, r = _block(attention, len(rows))
    pairs = []
    for start in range(0, attention.heads, h):
        heads = slice(start, min(start + h, attention.heads))
        pair: Pair | None = None
        for at in range(0, len(sequences), b):
            some = slice(at, at + b)
            n, whole, origin = (_of_heads(t[some], heads) for t in (visible, full, first))
            part = _measure(attention, sequences[some], heads, rows, n, whole, origin, r)
            pair = part if pair is None else merge(pair, part)
        assert pair is not None
        pairs.append(pair)
    return torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs], 1)


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


class _Tally(NamedTuple):
    """What is known of a block of sequences and heads after some of its rows. A used row is full and finite."""

    sums: Tensor  # float64 [9, b, h] over used rows: six row statistics, dropped mass, their count; then nonfinite
    largest: Tensor  # [2, b, h]: logit, query norm
    columns: Tensor  # float64 [b, h, Tk]: attention that each key takes, over used rows
    seen: Tensor  # float64 [b, h, Tk]: used rows that see the key
    reached: Tensor | None  # bool [b | 1, h | 1, Tk]: keys that any row sees; None: all
    maps: tuple[Tensor, ...]  # [b, h, some rows, Tk]: softmax over the keys, for map_rank
    masses: tuple[Tensor, ...]  # [b, h, some rows]: 1 less the dropped mass; 0 where not used

    def plus(self, other: _Tally) -> _Tally:
        return _Tally(
            self.sums + other.sums,
            torch.maximum(self.largest, other.largest),
            self.columns + other.columns,
            self.seen + other.seen,
            None if self.reached is None or other.reached is None else self.reached | other.reached,
            self.maps + other.maps,
            self.masses + other.masses,
        )


def _measure(
    attention: Attention, sequences: Tensor, heads: slice, rows: Tensor, n: Tensor, full: Tensor, first: Tensor, r: int
) -> Pair:
    """A block of sequences and heads, r rows at a time. n, full: `[b, h | 1, R]`; first: `[b, h | 1]`."""
    keys = attention.key_block(sequences, heads)
    stride = -(-len(rows) // RANK_ROWS)
    tally: _Tally | None = None
    for at in range(0, len(rows), r):
        part = slice(at, at + r)
        kept = slice(-at % stride, None, stride)
        rest = _tally(attention, keys, sequences, heads, rows[part], n[..., part], full[..., part], kept)
        tally = rest if tally is None else tally.plus(rest)
    assert tally is not None
    sums, dropped, used, nonfinite = tally.sums[:6], tally.sums[6], tally.sums[7], tally.sums[8]

    mean = torch.where(tally.seen > 0, tally.columns / tally.seen, 0.0)
    shared = (2 * tally.seen >= used[..., None]) & (used[..., None] > 0)
    sink_mass, sink = torch.where(shared, mean, -1.0).max(-1)
    known = used * (sink_mass >= 0)
    if attention.sinks is not None:
        sink_mass = torch.maximum(sink_mass, dropped / used)
    first_key_mass = mean.gather(-1, first.expand_as(used)[..., None])[..., 0]
    maps = tally.maps[0] if len(tally.maps) == 1 else torch.cat(tally.maps, 2)
    rank = _map_rank(maps, torch.cat(tally.masses, 2), sink)
    per_sequence = torch.where(known > 0, torch.stack([sink_mass, rank]), 0.0) * known

    key_norm = torch.full_like(tally.largest[0], -INF)
    if keys is not None:
        norms = _norms(keys).repeat_interleave(used.shape[1] // keys.shape[1], 1)
        key_norm = (norms if tally.reached is None else torch.where(tally.reached, norms, -INF)).amax(-1)
    largest = torch.cat([tally.largest, key_norm[None]]).amax(1).double()

    spread, ratio, entropy, entropy_ratio, saturated, gradient = sums.sum(1)
    total, unknown = used.sum(0), known.sum(0)
    held = (largest > -INF).double()
    values = [
        largest[0], spread, ratio, entropy, entropy_ratio, per_sequence[0].sum(0), (first_key_mass * used).sum(0),
        saturated, gradient, per_sequence[1].sum(0), largest[1], largest[2], nonfinite.sum(0),
    ]  # fmt: skip
    weights = [
        held[0], total, total, total, total, unknown, total,
        total, total, unknown, held[1], held[2], torch.ones_like(total),
    ]  # fmt: skip
    return torch.stack(values), torch.stack(weights)


def _tally(
    attention: Attention,
    keys: Tensor | None,
    sequences: Tensor,
    heads: slice,
    rows: Tensor,
    n: Tensor,
    full: Tensor,
    kept: slice,
) -> _Tally:
    """Some rows of a block; `kept` of them are for map_rank."""
    queries = attention.query_block(sequences, heads, rows)
    s = attention.logits(queries, keys, sequences, heads, rows)
    visible = attention.visible(sequences, heads, rows)
    lowest = s.amin(-1) if visible is None else torch.where(visible, s, INF).amin(-1)
    if visible is not None:
        s = torch.where(visible, s, LOW)
    s.clamp_(min=LOW)
    nonfinite = (s - s).nan_to_num_(nan=1.0).sum(-1)  # inf - inf is NaN; comparing would be slower
    s.nan_to_num_(nan=LOW, posinf=HUGE)
    top = s.amax(-1)
    use = full & (nonfinite == 0) & lowest.isfinite()

    s.sub_(top[..., None])
    # softmax, not exp: on CPU it is several times faster, most of all where keys are hidden.
    p = s.softmax(-1)
    peak = p.amax(-1)  # 1 / Z
    entropy = -peak.log() - s.mul_(p).sum(-1)
    square = torch.linalg.vector_norm(p, dim=-1) ** 2
    least = 0  # terms of the entropy beside the keys
    dropped = torch.zeros_like(top)
    if attention.sinks is not None:
        least = 1
        sink = attention.sinks.detach().float()
        sink = (sink if sink.numel() == 1 else sink[heads])[..., None]
        use = use & sink.isfinite()
        dropped = (sink - top + peak.log()).sigmoid()
        # Entropy of the choice between sink and keys, then of the choice among the keys.
        entropy = (1 - dropped) * entropy + torch.special.entr(dropped) + torch.special.entr(1 - dropped)
        square = (1 - dropped) ** 2 * square

    count = n.float()
    values = torch.stack([
        top - lowest,
        (top - lowest) / ((count - 1).clamp(min=1).log() + log(99)),
        entropy.clamp(min=0),
        (entropy / (count + least).log()).clamp(0, 1),
        ((1 - dropped) * peak > SATURATED).float(),
        (1 - square) * count / (count - 1),
        dropped,
        torch.ones_like(top),
    ])  # fmt: skip
    sums = torch.where(use, values, 0.0).sum(-1, dtype=torch.float64)
    seen = use.sum(-1, keepdim=True) if visible is None else _columns(use.float(), visible.float())
    weight = torch.where(use, 1 - dropped, 0.0)
    norm = torch.full_like(top, -INF) if queries is None else torch.where(n > 0, _norms(queries), -INF)
    top = torch.where((n > 0) & (top > LOW), top, -INF)
    top = torch.where(top < HUGE, top, INF)
    return _Tally(
        torch.cat([sums, nonfinite.sum(-1, dtype=torch.float64)[None]]),
        torch.stack([top, norm]).amax(-1),
        _columns(weight, p).double(),
        seen.double().expand(-1, -1, p.shape[-1]),
        None if visible is None else visible.any(-2),
        (p if kept == slice(0, None, 1) else p[:, :, kept].clone(),),
        (weight[:, :, kept],),
    )


def _columns(weights: Tensor, maps: Tensor) -> Tensor:
    """`[b, h, Tk]`: weighted sums over rows of `[b | 1, h | 1, R, Tk]`, without repeating what is shared."""
    if maps.shape[1] > 1:
        return (weights[..., None, :] @ maps)[..., 0, :]
    return weights @ (maps[0, 0] if maps.shape[0] == 1 else maps[:, 0])


def _norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1).nan_to_num(nan=-INF, posinf=INF)


def _map_rank(maps: Tensor, masses: Tensor, sink: Tensor) -> Tensor:
    """float64 `[b, h]`: effective rank of `[b, h, R, Tk]` without column `sink` `[b, h]`; overwrites maps.

    The Gram matrix may be float32, its eigenvalues not; both cost a fraction of singular values of the map.
    """
    maps.scatter_(-1, sink[..., None, None].expand(*maps.shape[:-1], 1), 0.0)
    left = maps.sum(-1)
    maps.mul_(torch.where(left * masses < 1e-6, 0.0, 1 / left)[..., None])
    gram = maps @ maps.mT if maps.shape[-2] <= maps.shape[-1] else maps.mT @ maps
    return effective_rank(torch.linalg.eigvalsh(gram.double()).clamp(min=0)).nan_to_num(nan=0.0)


def effective_rank(energy: Tensor) -> Tensor:
    """exp of the entropy of the shares of `energy` `[..., n]` (Roy and Vetterli 2007); NaN where there is none."""
    return torch.special.entr(energy / energy.sum(-1, keepdim=True)).sum(-1).exp()
