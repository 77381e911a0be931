"""Small attention calls of several layers, measured as one: calling operators costs more than their work there.

Calls of one shape stand side by side as the heads of one call, until they fill a block (`statistics.BLOCK`). What large
layers give is measured at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks import statistics
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.maps import Gram, Later, Pair
from attnwatch.hooks.precision import full_precision
from attnwatch.hooks.statistics import measure, placed


class Batch:
    """Calls that are measured as one. pair and grams, or the error, are there once they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pair: Pair | None = None
        self.grams: list[Gram] = []
        self.error: Exception | None = None

    def unrank(self) -> None:
        """Eigenvalues could not be had: the map rank stays unknown."""
        assert self.pair is not None
        self.grams = []
        self.pair[1][statistics.MAP_RANK] = 0


def rank(batches: Sequence[Batch]) -> None:
    """The map ranks of these. The host waits for the device."""
    statistics.add_ranks([(batch.pair, batch.grams) for batch in batches if batch.pair is not None])
    for batch in batches:
        batch.grams = []


class Share(NamedTuple):
    """One call of a batch: which of its heads."""

    batch: Batch
    heads: slice

    @property
    def pair(self) -> Pair:
        """Raises what measuring did."""
        if self.batch.pair is None:
            raise self.batch.error or RuntimeError("the call was not measured")
        values, weights = self.batch.pair
        return values[:, self.heads], weights[:, self.heads]


class _Open(NamedTuple):
    """A batch that is not full. queries, keys: copies of each call's, `[b, H, T, d]`: a model may overwrite its own."""

    batch: Batch
    like: Attention
    rows: Sequence[int]
    queries: list[Tensor]
    keys: list[Tensor]


class Together:
    """What the calls of one sample give. room: bytes for matrices that wait for their eigenvalues (`Later`)."""

    def __init__(self, room: int) -> None:
        self._later = Later(room)
        self._open: dict[Any, _Open] = {}

    def takes(self, size: int) -> bool:
        """Whether there is room for matrices of so many bytes, which then is taken."""
        return self._later.takes(size)

    def add(self, attention: Attention, sequences: list[int], rows: list[int], at_once: bool = False) -> Share:
        """Measures a call, now or with others. Autocast is to be off."""
        size = _size(attention, len(sequences), len(rows))
        if at_once or 2 * size > statistics.BLOCK or not _is_plain(attention):
            batch = Batch(attention.device)
            self._measure(batch, attention, sequences, rows)
            if batch.error is not None:
                raise batch.error
            return Share(batch, slice(0, attention.heads))
        q, k = attention.q, attention.k
        assert q is not None
        assert k is not None
        # Threads that run replicas of a model fill batches of their own.
        shapes = (tuple(sequences), q.shape, k.shape, q.dtype, k.dtype, q.device)
        same = (attention.scale, attention.causal, attention.window, attention.softcap, attention.dtype)
        key = (threading.get_ident(), *shapes, *same, attention.context)
        if key not in self._open:
            self._open[key] = _Open(Batch(q.device), replace(attention, q=None, k=None), rows, [], [])
        waiting = self._open[key]
        index = placed(sequences, q.device)
        waiting.queries.append(q.detach().index_select(0, index))
        waiting.keys.append(k.detach().index_select(0, index))
        count = len(waiting.queries)
        if (count + 1) * size > statistics.BLOCK:
            self._close(self._open.pop(key))
        return Share(waiting.batch, slice((count - 1) * attention.heads, count * attention.heads))

    def finish(self) -> None:
        """Measures what is left."""
        while self._open:
            _, waiting = self._open.popitem()
            with torch.no_grad(), full_precision(waiting.batch.device):
                self._close(waiting)

    def _close(self, waiting: _Open) -> None:
        whole = replace(waiting.like, q=torch.cat(waiting.queries, 1), k=torch.cat(waiting.keys, 1))
        self._measure(waiting.batch, whole, list(range(whole.batch)), waiting.rows)

    def _measure(self, batch: Batch, attention: Attention, sequences: list[int], rows: Sequence[int]) -> None:
        later = Later(self._later.room)
        try:
            batch.pair = measure(attention, sequences, list(rows), later)
            batch.grams = later.grams
        except Exception as error:
            batch.error = error
        self._later = Later(later.room)


def _size(a: Attention, sequences: int, rows: int) -> int:
    """Elements of the largest of its logits, queries and keys."""
    return sequences * a.heads * max(rows * a.keys, a.queries * a.head_dim, a.keys * a.head_dim)


def _is_plain(a: Attention) -> bool:
    """Whether everything that tells its heads apart is in q and k."""
    others = (a.mask, a.bias, a.sinks, a.scores, a.shift, a.mask_mod, a.score_mod)
    return a.q is not None and a.k is not None and all(x is None for x in others) and not isinstance(a.scale, Tensor)
