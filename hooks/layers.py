"""What is known of each attention layer, and the reading of its proofs on the host.

A layer is one call of one module in a forward. It is *verified* when its output could be made again from the captured
call and the projections behind q and k were proved; *logits_only* when the weights could not be; else *uncovered*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnwatch.hooks import weights
from attnwatch.hooks.maps import Pair
from attnwatch.hooks.precision import full_precision
from attnwatch.hooks.proof import reconstruct, score_scale, tolerance
from attnwatch.hooks.spectrum import BOUND, SPECTRUM, Factors, factors, spectra
from attnwatch.hooks.statistics import ATTENTION, finish, merge
from attnwatch.hooks.tap import Seen
from attnwatch.hooks.together import Share, rank
from attnwatch.hooks.update import UPDATE, Kept, change, keep, reader

METRICS = (*ATTENTION, *SPECTRUM, *UPDATE, *BOUND)
"""Every metric of a sample, in the order of its array."""

_NAMES = [metric.name for metric in METRICS]
_LOGIT_MAX, _NONFINITE = (_NAMES.index(name) for name in ("logit_max", "nonfinite"))
_WHOLE = [_NAMES.index(name) for name in ("layer_energy_top10", "layer_directions_90")]

WHOLE_EVERY, WHOLE_ALWAYS = 4, 256
"""Looks at a layer's weights from one that takes the values of the whole layer, and what the step did, to the next;
and the widest layer of which they are always taken: of wide ones they cost more than all the rest, and no default rule
needs them."""


@dataclass
class Layer:
    """What is known of one layer. keys: the proved choice of weights a side. bound: logit_bound `[H]`, last known.

    due: its weights are to be looked at in the next sample, whatever the schedule says. part: which part of the layer's
    heads this rank holds, of how many. kv_parts: into how many its key heads are split; 1 where each rank has all, 0
    while unknown. exact: its spectrum is not resolved in float32.
    rests: looks until the values of the whole layer and the step's update are taken again."""

    name: str
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    qk_norm: str = ""
    state: str = "uncovered"
    note: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    bound: NDArray[np.float64] | None = None
    due: bool = False
    exact: bool = False
    rests: int = 0
    part: tuple[int, int] = (0, 1)
    kv_parts: int = 0


def has_turn(layer: Layer, layers: Mapping[str, Layer], looks: int, share: int | None) -> bool:
    """Whether a look after so many others takes this one of all layers: `share` of them do, in turn (None: all), and
    those whose weights are not proved yet."""
    if share is None or layer.due or not layer.note:
        return True
    return (list(layers).index(layer.name) - looks * share) % len(layers) < share


@dataclass
class Draft:
    """What one layer gave in this step, still on the device.

    shares: one a micro-batch. factors wait for their eigenvalues, of which the spectrum `[S, H]` is made. factors,
    error `[]` (of the layer's output, or of c q.k against hand-written scores) and bound `[H]` are there only if the
    weights were looked at. kept: these weights, until the optimizer's step is done.
    """

    shares: list[Share]
    looked: bool
    by_hand: bool
    dropped: bool
    named: str  # what named the weights, "" where they are to be proved
    folded: bool
    sides: dict[str, weights.Side]
    factors: Factors | None = None
    spectrum: Tensor | None = None
    error: Tensor | None = None
    bound: Tensor | None = None
    packed: Tensor | None = None  # 0-d: documents in one packed sequence
    packed_by: str = ""
    channels: bool = False
    kept: Kept | None = None

    def compare(self) -> None:
        """After the optimizer's step: what it did to the weights joins the spectrum `[S + U, H]`."""
        if self.spectrum is not None:
            unknown = self.spectrum.new_full((len(UPDATE), self.spectrum.shape[1]), torch.nan)
            self.spectrum = torch.cat([self.spectrum, unknown if self.kept is None else change(self.kept)])

    @property
    def pair(self) -> Pair:
        """Of all micro-batches. Raises what measuring one of them did."""
        return reduce(merge, [share.pair for share in self.shares])

    @property
    def parts(self) -> list[Tensor]:
        """What travels to the host; `settle` reads it in this order."""
        optional = [x for x in (self.spectrum, self.error, self.bound, self.packed) if x is not None]
        return [*self.pair, *optional, *(side.errors for side in self.sides.values())]


def complete(drafts: dict[str, Draft], failed: Callable[[str, Exception], None]) -> None:
    """After the optimizer's step: all eigenvalues, and what the step did to the weights. The host waits for the device.

    A layer that cannot be completed is said to have `failed`, and left out if nothing of it was measured."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for device in {share.batch.device for made in drafts.values() for share in made.shares}:
            stack.enter_context(full_precision(device))
        for name, made in list(drafts.items()):
            error = next((share.batch.error for share in made.shares if share.batch.error is not None), None)
            if error is not None:
                failed(name, error)
                del drafts[name]
        _rank(drafts, failed)
        _solve(drafts, failed)
        for name, made in drafts.items():
            try:
                made.compare()
            except Exception as error:
                failed(name, error)
                made.kept = None
                made.compare()


def _rank(drafts: Mapping[str, Draft], failed: Callable[[str, Exception], None]) -> None:
    """Of all maps; together, or one batch after another if that fails."""
    batches = {id(share.batch): share.batch for made in drafts.values() for share in made.shares}
    try:
        rank(list(batches.values()))
    except Exception:
        for batch in batches.values():
            try:
                rank([batch])
            except Exception as error:
                batch.unrank()
                for name, made in drafts.items():
                    if any(share.batch is batch for share in made.shares):
                        failed(name, error)


def _solve(drafts: Mapping[str, Draft], failed: Callable[[str, Exception], None]) -> None:
    """Of all weights; together, or one layer after another if that fails."""
    try:
        solve(list(drafts.values()))
    except Exception:
        for name, made in drafts.items():
            try:
                solve([made])
            except Exception as error:
                made.factors = None
                failed(name, error)


def solve(drafts: Sequence[Draft]) -> None:
    """The spectra of these layers. The host waits for the device."""
    waiting = [(made, made.factors) for made in drafts if made.factors is not None]
    for (made, _), found in zip(waiting, spectra([each for _, each in waiting]), strict=True):
        made.factors, made.spectrum = None, found


def draft(
    seen: Seen, share: Share, sides: dict[str, weights.Side], look: bool, layer: Layer, module: nn.Module
) -> Draft:
    """Take from a call of `module` what proofs and spectrum need, with autocast off. No host synchronisation."""
    attention = seen.attention
    by_hand = attention.scores is not None
    made = Draft([share], look, by_hand, seen.dropped, seen.source if seen.weights else "", seen.folded, sides)
    if not look:
        return made
    made.channels = seen.channels
    if seen.packed is not None:
        made.packed, made.packed_by = seen.packed.document.amax(), seen.packed.by
    features = attention.head_dim or 1  # unknown where only scores are: then there is no norm to bound
    scale: float | Tensor = features**-0.5 if attention.scale is None else attention.scale
    if made.by_hand:
        if attention.q is not None and attention.k is not None:
            made.error, scale = score_scale(attention)
    elif seen.output is not None and seen.value is not None and not seen.dropped:
        made.error = reconstruct(seen)
    full = layer.rests == 0
    if seen.weights is not None:
        w_q, w_k = (w.detach() for w in seen.weights)
        made.factors = factors(w_q, w_k, layer.exact, full)
        if full:
            made.kept = keep(w_q.float(), w_k.float(), *(reader(w, module, Tensor.float) for w in (w_q, w_k)))
    elif sides:
        q, k = sides["q"], sides["k"]
        shared = min(q.weight.shape[1], k.weight.shape[1])  # part of a key may be made otherwise (layouts.py)
        w_q, w_k = q.weight[:, :shared], k.weight[:, :shared]
        made.factors = factors(w_q, w_k, layer.exact, full)
        made.kept = keep(w_q, w_k, q.read, k.read) if full else None
        if q.reach is not None and k.reach is not None:
            reach = k.reach.repeat_interleave(attention.heads // k.reach.shape[0])
            made.bound = (scale * q.reach * reach).abs()
    return made


class Row(NamedTuple):
    """What one layer gave. values: `[M, H]`. pair: values and weights of its attention maps, float64 `[2, A, H]`, that
    merge with those of other ranks; weights are 0 where nothing was measured."""

    values: NDArray[np.float32]
    pair: NDArray[np.float64]


def settle(layer: Layer, draft: Draft, numbers: Iterator[NDArray[np.float64]]) -> Row:
    """One layer's row from what came to the host; its state is set if its weights were looked at."""
    heads = layer.heads
    row = np.full((len(METRICS), heads), np.nan)
    pair = np.stack([next(numbers).reshape(len(ATTENTION), heads) for _ in range(2)])
    row[: len(ATTENTION)] = finished(pair)
    spectra = None if draft.spectrum is None else next(numbers).reshape(len(SPECTRUM) + len(UPDATE), heads)
    error = None if draft.error is None else float(next(numbers)[0])
    bound = None if draft.bound is None else next(numbers)
    documents = 1 if draft.packed is None else int(next(numbers)[0])
    errors = {side: next(numbers) for side in draft.sides}
    if draft.looked:
        proved = _judge(layer, draft, error, errors)
        if documents > 1 and layer.state != "uncovered":
            layer.note += f"; packed sequences told apart by {draft.packed_by}"
        layer.bound = bound if proved else None
        if proved and spectra is not None:
            row[len(ATTENTION) : -len(BOUND)] = spectra
            wide = layer.heads * layer.head_dim > WHOLE_ALWAYS
            layer.rests = (layer.rests or WHOLE_EVERY) - 1 if wide else 0
            if np.isnan(spectra[0]).any() and not layer.exact:
                layer.exact, layer.due, layer.rests = True, True, 0
            if layer.part[1] > 1:
                row[_WHOLE] = np.nan  # of some of the heads they would be another number
    elif not layer.note:
        layer.state, layer.note, layer.due = "logits_only", "weights not looked at yet", True
    if np.isnan(row[_LOGIT_MAX]).all() and not row[_NONFINITE].any():
        layer.state, layer.due = "uncovered", True
        layer.note = "no row sees any key, as far as its masks were understood"
    if layer.state == "uncovered":
        row[:], pair[1] = np.nan, 0.0
    elif layer.bound is not None:
        row[-2] = layer.bound
        row[-1] = row[_LOGIT_MAX] / layer.bound
    return Row(row.astype(np.float32), pair)


def finished(pair: NDArray[np.float64]) -> NDArray[np.float64]:
    """The statistics of attention maps `[A, H]` of values and weights `[2, A, H]`; NaN where nothing was measured."""
    done: NDArray[np.float64] = finish((torch.from_numpy(pair[0]), torch.from_numpy(pair[1]))).numpy()
    return done


def _judge(layer: Layer, draft: Draft, error: float | None, errors: dict[str, NDArray[np.float64]]) -> bool:
    """Set the layer's state and note. True when this step's spectrum came from proved weights."""
    limit = tolerance(getattr(torch, layer.dtype))
    layer.due = False
    if draft.channels:
        layer.state, layer.note = "uncovered", "attends over channels, not over positions"
        return False
    if not draft.by_hand and error is not None and not error < limit:
        layer.state = "uncovered"
        layer.note = f"its output could not be made again from q, k, v and masks (relative error {error:.1e})"
        return False
    how = _how(draft, error)
    if draft.named:
        layer.state, layer.note = "verified", f"{draft.named}; {how}"
        return True
    layer.state = "logits_only"
    if draft.folded:
        layer.note = f"heads cannot be told from sequences; {how}"
        return False
    if not errors:
        layer.note = f"no projection seen that could make q and k; {how}"
        return False
    # A wrong choice may come near by chance (a norm of what is nearly normed already), a right one nearer.
    right = {side: np.flatnonzero((e < limit) & (e < 10 * e.min() + 1e-5)) for side, e in errors.items()}
    for side, found in right.items():
        if not found.size:
            layer.note = f"no projection and layout makes {side} (best relative error {errors[side].min():.1e}); {how}"
            layer.keys.pop(side, None)
            return False
    best = {side: int(found[0]) for side, found in right.items()}
    layer.keys = {side: draft.sides[side].keys[i] for side, i in best.items()}
    q, k = draft.sides["q"], draft.sides["k"]
    kinds = (q.kinds[best["q"]], k.kinds[best["k"]])
    layer.qk_norm = kinds[0] if kinds[0] == kinds[1] else " / ".join(kind or "none" for kind in kinds)
    layer.kv_heads = k.heads[best["k"]]
    key = layer.keys["k"]
    layer.kv_parts = key.parts if isinstance(key, weights.Key) else key[0].parts
    named = [f"W_{side} = {weights.describe(key)}" for side, key in layer.keys.items()]
    layer.state, layer.note = "verified", f"{', '.join(named)}; {how}"
    layer.due = any(best.values())  # proved, but the spectrum of this step was of the first guess
    return not layer.due


def _how(draft: Draft, error: float | None) -> str:
    if draft.by_hand:
        return "logits as the softmax got them"
    if error is not None:
        return f"output made again to {error:.0e}"
    return "attention dropout hides the output" if draft.dropped else "q and k as given"
