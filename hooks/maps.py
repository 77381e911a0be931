"""One block of attention maps, some rows at a time, reduced to values and weights that merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.eigen import effective_rank, eigenvalues

RANK_ROWS = 1024
"""Most rows that one sequence gives to `map_rank`: its cost grows with their third power."""

SATURATED = 0.99
CLIP = 100.0
"""The threshold at which QK-Clip acts, as in Kimi K2."""

INF = float("inf")
HUGE = torch.finfo(torch.float32).max
LOW = -HUGE / 2  # stands for a hidden logit: unlike -inf, 0 * LOW is 0

Pair = tuple[Tensor, Tensor]
"""Values and weights, float64 `[17, H]` each in the order of `ATTENTION`, of any sequences, micro-batches or ranks.

mean: the weighted sum and its weight; max, min: the largest (-inf with weight 0: none), the least, and 1; sum: the sum
and 1.
"""


class Gram(NamedTuple):
    """What `map_rank` is made of: the products of a map's rows with each other, without the sink key.

    matrices: float32 `[b, h, n, n]`. rows: float64 `[b, h]`, how many each speaks for. heads: which of the layer's.
    """

    matrices: Tensor
    rows: Tensor
    heads: slice


@dataclass
class Later:
    """What waits on the device for its eigenvalues, which the hooks of a forward do not take. room: bytes for more;
    what finds none is done at once, and the host waits."""

    room: int
    grams: list[Gram] = field(default_factory=list)

    def takes(self, size: int) -> bool:
        fits = size <= self.room
        self.room -= size if fits else 0
        return fits


class _Tally(NamedTuple):
    """What is known of a block of sequences and heads after some of its rows. A used row is full and finite."""

    sums: Tensor  # float64 [13, b, h] over used rows: nine statistics, rows of the ninth, dropped mass, rows; nonfinite
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


def measure_block(
    attention: Attention,
    sequences: Tensor,
    heads: slice,
    rows: Tensor,
    n: Tensor,
    full: Tensor,
    first: Tensor,
    r: int,
    later: Later,
) -> Pair:
    """A block of sequences and heads, r rows at a time. n, full: `[b, h | 1, R]`; first: `[b, h | 1]`. Of what `later`
    takes the ranks are still to be added."""
    keys = attention.key_block(sequences, heads)
    stride = -(-len(rows) // RANK_ROWS)
    tally: _Tally | None = None
    for at in range(0, len(rows), r):
        part = slice(at, at + r)
        kept = slice(-at % stride, None, stride)
        rest = _tally(attention, keys, sequences, heads, rows[part], n[..., part], full[..., part], kept)
        tally = rest if tally is None else tally.plus(rest)
    assert tally is not None
    sink_mass, first_key_mass, known, matrices = _by_sequence(tally, first)
    gram = Gram(matrices, known, heads)
    rank = known.new_zeros(known.shape[1])
    if later.takes(matrices.nbytes):
        later.grams.append(gram)
    else:
        (rank,) = ranks([gram])
    key_norm = torch.full_like(tally.largest[0], -INF)
    if keys is not None:
        norms = _norms(keys).repeat_interleave(known.shape[1] // keys.shape[1], 1)
        key_norm = (norms if tally.reached is None else torch.where(tally.reached, norms, -INF)).amax(-1)
    logit, query_norm, key_norm = torch.cat([tally.largest, key_norm[None]]).amax(1).double()

    spread, ratio, entropy, entropy_ratio, saturated, gradient, sharp, tied, outlier, paired, _, used, nonfinite = (
        tally.sums.sum(1)
    )
    clip = CLIP / logit.clamp(min=CLIP)
    values = [
        logit, spread, ratio, entropy, entropy_ratio, sink_mass, first_key_mass, saturated, gradient, rank,
        sharp, tied, outlier, query_norm, key_norm, clip, nonfinite,
    ]  # fmt: skip
    total, some = known.sum(0), logit > -INF
    forecast = torch.zeros_like(used) if attention.context is None else used
    weights = [
        some, used, used, used, used, total, used, used, used, total,
        forecast, used, paired, query_norm > -INF, key_norm > -INF, some, torch.ones_like(used),
    ]  # fmt: skip
    return torch.stack(values), torch.stack([w.double() for w in weights])


def _by_sequence(tally: _Tally, first: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 `[h]`: sums of sink mass and first-key mass, each times its rows; `[b, h]`: rows of the first and of the
    map rank, 0 where no key is seen by half of the used rows; `[b, h, n, n]`: what the rank comes from."""
    dropped, used = tally.sums[-3], tally.sums[-2]
    mean = torch.where(tally.seen > 0, tally.columns / tally.seen, 0.0)
    shared = (2 * tally.seen >= used[..., None]) & (used[..., None] > 0)
    sink_mass, sink = torch.where(shared, mean, -1.0).max(-1)
    known = used * (sink_mass >= 0)
    first_key_mass = mean.gather(-1, first.expand_as(used)[..., None])[..., 0]
    maps = tally.maps[0] if len(tally.maps) == 1 else torch.cat(tally.maps, 2)
    return (
        torch.where(known > 0, torch.maximum(sink_mass * used, dropped), 0.0).sum(0),
        (first_key_mass * used).sum(0),
        known,
        _gram(maps, torch.cat(tally.masses, 2), sink),
    )


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
    visible = attention.visible(sequences, heads, rows)
    s, spare, lowest, nonfinite = _tame(attention.logits(queries, keys, sequences, heads, rows), visible)
    use = full & (nonfinite == 0) & lowest.isfinite()
    top, key = s.max(-1)
    second = s.scatter_(-1, key[..., None], LOW).amax(-1)
    s.scatter_(-1, key[..., None], top[..., None]).sub_(top[..., None])
    # softmax, not exp: on CPU it is several times faster, most of all where keys are hidden.
    p = torch.softmax(s, -1, out=spare)
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
    spread = top - lowest
    tied = top.to(attention.precision) == second.to(attention.precision)
    outlier = torch.full_like(top, torch.nan) if queries is None or keys is None else _outlier(queries, keys, key)
    paired = outlier.isfinite()
    values = torch.stack([
        spread,
        spread / ((count - 1).clamp(min=1).log() + log(99)),
        entropy.clamp(min=0),
        (entropy / (count + least).log()).clamp(0, 1),
        ((1 - dropped) * peak > SATURATED).float(),
        (1 - square) * count / (count - 1),
        (spread - log(attention.context or 1)).clamp(max=0).exp(),  # min(1, exp(spread) / context)
        tied.float(),
        torch.where(paired, outlier, 0.0),
        paired.float(),
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


def _tame(s: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finite logits, LOW where hidden, and as much memory to write on; of each row the smallest visible one as it was,
    and how many NaN and +inf. Overwrites s: the system takes longer to give new memory than we to fill it."""
    if visible is None:
        spare = torch.empty_like(s)
        lowest = s.amin(-1)
    else:
        spare, s = s, torch.where(visible, s, LOW)
        # Adding is cheaper than choosing once more.
        lowest = torch.add(s, torch.where(visible, 0.0, INF), out=spare).amin(-1)
    s.clamp_(min=LOW)
    nonfinite = torch.sub(s, s, out=spare).nan_to_num_(nan=1.0).sum(-1)  # inf - inf is NaN; comparing would be slower
    return s.nan_to_num_(nan=LOW, posinf=HUGE), spare, lowest, nonfinite


def _outlier(queries: Tensor, keys: Tensor, key: Tensor) -> Tensor:
    """`[b, h, R]`: the largest `|q_c k_c|` over the sum of all, of each row and its `key`; NaN where all are 0."""
    starts = torch.arange(0, keys[..., 0].numel(), keys.shape[2], device=keys.device).view(*keys.shape[:2], 1)
    at = starts + key.reshape(*keys.shape[:2], -1)  # index_select copies whole rows: ten times as fast as gather
    parts = keys.flatten(0, 2).index_select(0, at.flatten()).view_as(queries).mul_(queries).abs_()
    return parts.amax(-1) / parts.sum(-1)


def _columns(weights: Tensor, maps: Tensor) -> Tensor:
    """`[b, h, Tk]`: weighted sums over rows of `[b | 1, h | 1, R, Tk]`, without repeating what is shared."""
    if maps.shape[1] > 1:
        return (weights[..., None, :] @ maps)[..., 0, :]
    return weights @ (maps[0, 0] if maps.shape[0] == 1 else maps[:, 0])


def _norms(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.nan_to_num(nan=-INF, posinf=INF)


def _gram(maps: Tensor, masses: Tensor, sink: Tensor) -> Tensor:
    """`[b, h, n, n]` of `[b, h, R, Tk]` without column `sink` `[b, h]`, rows of sum 1; overwrites maps."""
    maps.scatter_(-1, sink[..., None, None].expand(*maps.shape[:-1], 1), 0.0)
    left = maps.sum(-1)
    maps.mul_(torch.where(left * masses < 1e-6, 0.0, 1 / left)[..., None])
    return maps @ maps.mT if maps.shape[-2] <= maps.shape[-1] else maps.mT @ maps


def ranks(grams: Sequence[Gram]) -> list[Tensor]:
    """float64 `[h]` of each: the sum over sequences of effective rank times rows.

    A Gram matrix may be float32, its eigenvalues not; both cost a fraction of singular values of the map.
    """
    energies = eigenvalues([gram.matrices for gram in grams], torch.float64)
    return [
        (effective_rank(energy.clamp(min=0)).nan_to_num(nan=0.0) * gram.rows).sum(0)
        for energy, gram in zip(energies, grams, strict=True)
    ]
