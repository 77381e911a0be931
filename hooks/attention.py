"""What a statistic sees of one attention call: logits and visibility, a block of sequences, heads and rows at a time.

B sequences, H query heads, Hk key heads, Tq queries (rows), Tk keys, d features of a head; b, h, R: those of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

HIDDEN_MASK = -9999.0
"""A float mask of -1e4 or -1e9 means "hidden" as surely as one of -inf; no learned bias reaches it."""

HIDDEN_SCORE = -1e8
"""Hand-written attention hides keys with a large negative number as often as with the lowest one of the dtype."""


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention call, as the softmax sees it.

    q: `[B, H, Tq, d]` and k: `[B, Hk, Tk, d]`, any float dtype: what really enters the product. `H % Hk == 0`; query
        head h uses key head `h // (H / Hk)`.
    scale: None is `1/sqrt(d)`; a tensor is 0-d or `[H]`.
    causal: top-left aligned, row i sees keys `j <= i`. window: row i sees keys `j > i - window`.
    mask: broadcastable to `[B, H, Tq, Tk]` as torch broadcasts; bool is True where visible, float is added.
    bias: float, broadcastable likewise, added after the soft-cap. In a float mask a value of at most `HIDDEN_MASK`,
        in a bias one of at most half of its dtype's minimum hides the key.
    softcap: `s <- cap * tanh(s / cap)`, before mask and bias.
    sinks: `[H]`, one learned logit a head that takes part in the softmax and is then dropped.
    scores: `[B, H, Tq, Tk]`, the logits themselves where attention is written by hand: scale, soft-cap, bias and masks
        are already in them and are not applied again. Causal, window and the masks still say what is visible, and so
        does a score of at most half of its dtype's minimum, or of `HIDDEN_SCORE`. q and k then only give the norms and
        the coordinates of the top key's product.
    shift: broadcastable to `[B, H, Tq, 1]`, what the code took from the scores of a row before its softmax.
    mask_mod, score_mod: as flex_attention takes them, `(b, h, i, j) -> bool` and `(score, b, h, i, j) -> score`, called
        with index tensors that broadcast to `[b, h, R, Tk]`.
    dtype: what the model computes the logits in; None is that of the scores, or of q. `tied_rows` rounds to it.
    context: keys of the longer row that `forecast_sharpness` speaks of.
    """

    q: Tensor | None
    k: Tensor | None
    scale: float | Tensor | None = None
    causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scores: Tensor | None = None
    shift: Tensor | None = None
    mask_mod: Callable[..., Tensor] | None = None
    score_mod: Callable[..., Tensor] | None = None
    dtype: torch.dtype | None = None
    context: int | None = None

    @property
    def _shaped(self) -> Tensor:
        shaped = self.q if self.scores is None else self.scores
        if shaped is None:
            raise ValueError("expected q and k, or scores; found neither: pass q and k")
        return shaped

    @property
    def device(self) -> torch.device:
        return self._shaped.device

    @property
    def precision(self) -> torch.dtype:
        """What the model computes the logits in."""
        return self._shaped.dtype if self.dtype is None else self.dtype

    @property
    def batch(self) -> int:
        return self._shaped.shape[0]

    @property
    def heads(self) -> int:
        return self._shaped.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.heads if self.k is None else self.k.shape[1]

    @property
    def queries(self) -> int:
        return self._shaped.shape[2]

    @property
    def keys(self) -> int:
        return self.scores.shape[3] if self.scores is not None else 0 if self.k is None else self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """0 where only scores are known."""
        return 0 if self.q is None else self.q.shape[3]

    def query_block(self, sequences: Tensor, heads: slice, rows: Tensor) -> Tensor | None:
        """float32 `[b, h, R, d]`."""
        return None if self.q is None else _take(self.q, sequences, heads, rows).float()

    def key_block(self, sequences: Tensor, heads: slice) -> Tensor | None:
        """float32 `[b, key heads that `heads` use, Tk, d]`."""
        if self.k is None:
            return None
        group = self.heads // self.kv_heads
        used = slice(heads.start // group, (heads.stop - 1) // group + 1)
        return self.k.detach()[:, used].index_select(0, sequences).float()

    def logits(
        self, queries: Tensor | None, keys: Tensor | None, sequences: Tensor, heads: slice, rows: Tensor
    ) -> Tensor:
        """float32 `[b, h, R, Tk]`, hidden keys included, a new tensor; queries and keys: the blocks of this part.

        `heads` must be whole groups of one key head each, or lie within one group.
        """
        if self.scores is not None:
            # A float32 score would pass through .float() uncopied, but _take has copied it already.
            scores = _take(self.scores, sequences, heads, rows).float()
            return scores if self.shift is None else scores.add_(_take(self.shift, sequences, heads, rows))
        if queries is None or keys is None:
            raise ValueError("expected the query and key blocks of attention without scores; found None")
        b, h, r, d = queries.shape
        # The rows of all heads that share a key head are one taller matrix: keys are never repeated.
        grouped = (queries * self._scale_of(heads)).reshape(b, keys.shape[1], -1, d)
        logits = (grouped @ keys.mT).view(b, h, r, -1)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.score_mod is not None:
            changed = self.score_mod(logits, *self._indices(sequences, heads, rows)).float()
            logits = changed.clone(memory_format=torch.contiguous_format)  # what it returned may be the user's
        for added in self._added:
            logits.add_(_take(added, sequences, heads, rows))
        return logits

    def visible(self, sequences: Tensor, heads: slice, rows: Tensor) -> Tensor | None:
        """bool `[b | 1, h | 1, R, Tk]`; None where everything is visible."""
        seen: Tensor | None = None
        if self.causal or self.window is not None:
            low, high = self._reach(rows)
            key = torch.arange(self.keys, device=self.device)
            seen = (key >= low[:, None]) & (key < high[:, None])
        for source in self._hiding:
            part = _shows(_take(source, sequences, heads, rows), self._limit(source))
            seen = part if seen is None else seen & part
        if self.mask_mod is not None:
            part = self.mask_mod(*self._indices(sequences, heads, rows))
            seen = part if seen is None else seen & part
        if seen is None:
            return None
        return seen.expand(*(1,) * (4 - seen.dim()), *seen.shape[:-2], len(rows), self.keys)

    def counts(self, sequences: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Over all rows: `n_i` int64 `[b, h | 1, Tq]`, and the first key that any row sees, int64 `[b, h | 1]`.

        h is all heads, where visibility differs by head. The first key is meaningless where nothing is visible.
        No temporary holds more than `elements` numbers, or one row of every head where that is more.
        """
        rows = torch.arange(self.queries, device=self.device)
        heads = slice(0, self.heads)
        low, high = self._reach(rows)
        if not self._hiding and self.mask_mod is None:
            count = (high - low).expand(len(sequences), 1, -1)
            return count, count.new_zeros(len(sequences), 1)
        if self.mask_mod is None and all(_rank4(source).shape[2] == 1 for source in self._hiding):
            shown = self._padding(sequences, heads).expand(len(sequences), -1, -1)
            before = torch.nn.functional.pad(shown.cumsum(-1), (1, 0))  # visible keys before key j
            return before[..., high] - before[..., low], shown.long().argmax(-1)
        step = max(1, elements // (len(sequences) * self.heads * max(1, self.keys)))
        counts, seen = [], None
        for chunk in torch.split(rows, step):
            part = self.visible(sequences, heads, chunk)
            assert part is not None
            part = part.expand(len(sequences), *part.shape[1:])
            counts.append(part.sum(-1))
            seen = part.any(-2) if seen is None else seen | part.any(-2)
        assert seen is not None
        return torch.cat(counts, -1), seen.long().argmax(-1)

    def _indices(self, sequences: Tensor, heads: slice, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch, head, row and key of every entry of a block, each of 4 dimensions that broadcast."""
        head = torch.arange(heads.start, heads.stop, device=self.device)
        key = torch.arange(self.keys, device=self.device)
        return sequences[:, None, None, None], head[:, None, None], rows[:, None], key

    def _scale_of(self, heads: slice) -> float | Tensor:
        if isinstance(self.scale, Tensor):
            scale = self.scale.detach().float()
            return scale if scale.numel() == 1 else scale[heads, None, None]
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def _added(self) -> list[Tensor]:
        """What is added to the logits: a float mask, the bias."""
        return [t.detach() for t in (self.mask, self.bias) if t is not None and t.dtype != torch.bool]

    @property
    def _hiding(self) -> list[Tensor]:
        """What may hide a key, beside causal and window."""
        return [t for t in (self.mask, self.bias, self.scores) if t is not None]

    def _reach(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row i may see keys `low_i <= j < high_i`, as far as causal and window say. int64 `[R]` each."""
        none = torch.zeros_like(rows)
        high = (rows + 1).clamp(max=self.keys) if self.causal else none + self.keys
        low = none if self.window is None else (rows - self.window + 1).clamp(min=0)
        return torch.minimum(low, high), high

    def _limit(self, source: Tensor) -> float:
        """What hides a key in a mask, in hand-written scores; a bias hides only by half of its dtype's minimum."""
        return HIDDEN_SCORE if source is self.scores else HIDDEN_MASK if source is self.mask else -torch.inf

    def _padding(self, sequences: Tensor, heads: slice) -> Tensor:
        """bool `[b | 1, h | 1, Tk]`: keys shown by masks that are the same for every row."""
        rows = sequences.new_zeros(1)
        shown = [_shows(_take(t, sequences, heads, rows), self._limit(t)) for t in self._hiding]
        return reduce(torch.logical_and, shown)[:, :, 0].expand(-1, -1, self.keys)


def check(attention: Attention) -> None:
    """Raises ValueError, one line, where shapes or dtypes do not fit together."""
    a = attention
    if (a.q is None or a.k is None) and a.scores is None:
        raise ValueError("expected q and k, or scores; found neither: pass q [B, H, Tq, d] and k [B, Hk, Tk, d]")
    for name, tensor in (("q", a.q), ("k", a.k), ("scores", a.scores)):
        if tensor is not None and (tensor.dim() != 4 or not tensor.is_floating_point()):
            raise ValueError(
                f"expected {name} of 4 dimensions (batch, heads, positions, ...) and a float dtype; "
                f"found {list(tensor.shape)} {tensor.dtype}: reshape or cast it"
            )
    if a.q is not None and a.k is not None and not _pair(a.q.shape, a.k.shape):
        raise ValueError(
            "expected q [B, H, Tq, d] and k [B, Hk, Tk, d] with H a multiple of Hk; "
            f"found q {list(a.q.shape)} and k {list(a.k.shape)}: is one of them transposed?"
        )
    whole = [a.batch, a.heads, a.queries, a.keys]
    if min(whole) == 0:
        raise ValueError(f"expected at least one sequence, head, query and key; found [B, H, Tq, Tk] = {whole}")
    if a.scores is not None and a.q is not None and [*a.q.shape[:3]] != whole[:3]:
        raise ValueError(f"expected q of the same batch, heads and rows as scores {whole}; found {list(a.q.shape)}")
    for name, tensor in (("mask", a.mask), ("bias", a.bias)):
        if tensor is None:
            continue
        if not (tensor.is_floating_point() or (name == "mask" and tensor.dtype == torch.bool)):
            raise ValueError(f"expected a bool or float mask, a float bias; found {name} of {tensor.dtype}: cast it")
        if tensor.dim() > 4 or any(n not in (1, w) for n, w in zip(_rank4(tensor).shape, whole, strict=True)):
            raise ValueError(
                f"expected {name} to broadcast to [B, H, Tq, Tk] = {whole}; found {list(tensor.shape)}: "
                "give it dimensions of 1 where it does not vary"
            )
    for name, value in (("scale", a.scale), ("sinks", a.sinks)):
        if isinstance(value, Tensor) and value.numel() != 1 and list(value.shape) != [a.heads]:
            raise ValueError(f"expected {name} of one value a head [{a.heads}]; found {list(value.shape)}")
    if a.window is not None and a.window < 1:
        raise ValueError(f"expected window of at least 1 key; found {a.window}: use None for no window")
    if a.softcap is not None and a.softcap <= 0:
        raise ValueError(f"expected softcap above 0; found {a.softcap}: use None for no soft-cap")
    if a.context is not None and a.context < 2:
        raise ValueError(f"expected context of at least 2 keys; found {a.context}: use None for no forecast")


def _pair(q: torch.Size, k: torch.Size) -> bool:
    return q[0] == k[0] and q[3] == k[3] and q[1] % max(1, k[1]) == 0


def _rank4(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]


def _take(tensor: Tensor, sequences: Tensor, heads: slice, rows: Tensor) -> Tensor:
    """The part `[b | 1, h | 1, R | 1, ...]` of what broadcasts to `[B, H, Tq, ...]`; copies that part only."""
    full = _rank4(tensor.detach())
    if full.shape[1] > 1:
        full = full[:, heads]
    b = sequences if full.shape[0] > 1 else sequences[:1] * 0
    r = rows if full.shape[2] > 1 else rows[:1] * 0
    return full[b[:, None], :, r].transpose(1, 2)  # indices apart: torch puts their dimensions [b, R] first


def _shows(part: Tensor, limit: float) -> Tensor:
    """bool: where a mask, bias or score shows the key: above `limit` and half of its dtype's minimum. NaN shows."""
    if part.dtype == torch.bool:
        return part
    return ~(part <= max(torch.finfo(part.dtype).min / 2, limit))
