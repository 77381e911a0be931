"""Which rows of which weight are head h's W_q and W_k: guessed from names and shapes, then proved, never assumed.

Candidates pair a projection seen in the layer with a layout of its output and, if the layer normalises, a norm. Each
makes some tokens' vectors from the projection's real output; the one whose vectors are the captured q (or k), up to a
rotary embedding and a constant, is right. Only the best guess is used in the same step; the proof is read afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnwatch.hooks.proof import mismatch, token_rows
from attnwatch.hooks.tap import Frame, Norm, Product

MAX_CANDIDATES = 64


class Layout(NamedTuple):
    """How a projection's features are split: `take` maps `[..., out]` to `[..., heads, d]`."""

    label: str
    heads: int
    take: Callable[[Tensor], Tensor]


class Key(NamedTuple):
    """Identity of a proved choice from step to step."""

    weight: str
    layout: str
    norm: str
    sequence_first: bool


class Candidate(NamedTuple):
    key: Key
    product: Product
    layout: Layout
    norm: Norm | None
    across: bool  # the norm is taken over all heads together


class Side(NamedTuple):
    """One side's weights (queries or keys) as of this step, and how good each choice was.

    weight: `[Hx, d, in]` of the first choice, gain folded in. errors: `[n]` on the device, one a key. reach: `[H]`, the
    largest length a vector can have after the norm (None without one). kinds, heads: norm and heads of each choice.
    """

    keys: tuple[Key, ...]
    errors: Tensor
    weight: Tensor
    reach: Tensor | None
    kinds: tuple[str, ...]
    heads: tuple[int, ...]


def look(side: str, x: Tensor, query_heads: int, frame: Frame, known: Key | None) -> Side | None:
    """The weights behind `x [B, Hx, T, d]` (side "q" or "k"), or None if no projection fits.

    known: the choice proved before, looked for first. No host synchronisation.
    """
    found = list(_candidates(side, x, query_heads, frame))
    found = [candidate for candidate in found if candidate.key == known] or found
    kept, errors, ratios = [], [], []
    for candidate in found[:MAX_CANDIDATES]:
        made = _make(candidate)
        if made is not None:
            real, position = token_rows(x, candidate.product.stride, made.shape[0], candidate.key.sequence_first)
            error, ratio = mismatch(real, made, position)
            kept.append(candidate)
            errors.append(error)
            ratios.append(ratio)
    if not kept:
        return None
    first = kept[0]
    weight = first.layout.take(first.product.weight.t().float()).permute(1, 2, 0)
    reach = None
    if first.norm is not None:
        gain = _gain(first)
        size = gain.numel() if first.across else gain.shape[-1]
        peak = gain.abs().max() if first.across else gain.abs().amax(-1)
        peak = peak.expand(weight.shape[0]) if peak.dim() == 0 else peak
        reach = ratios[0].abs() * size**0.5 * peak.repeat_interleave(x.shape[1] // weight.shape[0])
        weight = weight * (gain * size**0.5 if _is_l2(first.norm) else gain).unsqueeze(-1)
    return Side(
        tuple(c.key for c in kept),
        torch.stack(errors),
        weight,
        reach,
        tuple(_kind(c) for c in kept),
        tuple(c.layout.heads for c in kept),
    )


# --- candidates ---------------------------------------------------------------------------------------------------


def _candidates(side: str, x: Tensor, query_heads: int, frame: Frame) -> Iterator[Candidate]:
    """Best guess first: names that say query or key, norms if the layer has any, plain layouts before rare ones."""
    batch, heads, length, d = x.shape
    names = {p.untyped_storage().data_ptr(): name for name, p in frame.module.named_parameters()}
    named = [(product, _name(product, names)) for product in frame.products if product.tokens == batch * length]
    named.sort(key=lambda pair: not _says(side, pair[1]))
    norms = _norms(side, frame.norms, d)
    norms = [*norms, (None, False)] if norms else [(None, False), (Norm("normalize", _unit, d, True), False)]
    for norm, across in norms:
        for product, name in named:
            orders = (True, False) if tuple(product.lead) == (length, batch) and batch != length else (False, True)
            for layout in _layouts(side, product.weight.shape[0], query_heads, heads, d, name):
                for sequence_first in orders if batch > 1 and length > 1 else (False,):
                    key = Key(name, layout.label, _label(norm, across), sequence_first)
                    yield Candidate(key, product, layout, norm, across)


def _name(product: Product, names: dict[int, str]) -> str:
    weight = product.weight
    name = names.get(weight.untyped_storage().data_ptr(), "?")
    return f"{name}+{weight.storage_offset()}" if weight.storage_offset() else name


def _says(side: str, name: str) -> bool:
    return side in re.sub(r"^.*block|^.*kernel", "", name.lower())


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _norms(side: str, norms: list[Norm], d: int) -> list[tuple[Norm | None, bool]]:
    """Norms that may stand between projection and product, and whether over all heads; queries are normed first."""
    fitting = [norm for norm in norms if norm.size % d == 0]
    if side == "k":
        fitting.reverse()
    fitting.sort(key=lambda norm: norm.functional)
    return [(norm, across) for norm in fitting for across in ((True, False) if norm.size > d else (False,))]


def _label(norm: Norm | None, across: bool) -> str:
    return "" if norm is None else f"{norm.label}{' across heads' if across else ''}"


def _layouts(side: str, out: int, queries: int, heads: int, d: int, name: str) -> Iterator[Layout]:
    """Ways in which `out` features can hold the queries of `queries` heads, or keys of `heads` heads or of any divisor
    (keys may have been repeated for grouped queries)."""
    counts = [queries] if side == "q" else [kv for kv in range(heads, 0, -1) if heads % kv == 0]
    grouped = [
        _grouped(side, kv, queries // kv, d)
        for kv in range(queries, 0, -1)
        if queries % kv == 0 and out == kv * (queries // kv + 2) * d
    ]
    blocks = [
        (count, offset)
        for count in counts
        for offset in range(0, out - count * d + 1, count * d)
        if count == counts[0] or offset in (0, queries * d, out - count * d)
    ]
    if side == "k":  # [q; k; v] is by far the commonest fusion: keys right behind the queries, as many as the values
        blocks.sort(key=lambda block: not (block[1] == queries * d and out == (queries + 2 * block[0]) * d))
    plain = [_block(offset, count, d, out) for count, offset in blocks]
    yield from grouped + plain if "query_key_value" in name else plain + grouped
    part = 0 if side == "q" else 1
    if out == 3 * queries * d:
        yield Layout("head, feature, [q k v]", queries, lambda x: x.unflatten(-1, (queries, d, 3))[..., part])
    if side == "k":
        for kv in counts:
            if out == 2 * kv * d:
                yield Layout("head, [k v], feature", kv, _first_of_two(kv, d))
    if out == counts[0] * d and counts[0] > 1:
        swapped = (d, counts[0])
        yield Layout("feature, head", counts[0], lambda x: x.unflatten(-1, swapped).transpose(-1, -2))


def _first_of_two(heads: int, d: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.unflatten(-1, (heads, 2, d))[..., 0, :]


def _block(offset: int, heads: int, d: int, out: int) -> Layout:
    label = "whole" if out == heads * d else f"rows {offset} to {offset + heads * d}"
    return Layout(label, heads, lambda x: x[..., offset : offset + heads * d].unflatten(-1, (heads, d)))


def _grouped(side: str, kv: int, queries: int, d: int) -> Layout:
    def take(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (kv, queries + 2, d))
        return x[..., :queries, :].flatten(-3, -2) if side == "q" else x[..., queries, :]

    return Layout(f"{kv} groups of [{queries} q, k, v]", kv * queries if side == "q" else kv, take)


# --- what a candidate makes ---------------------------------------------------------------------------------------


def _make(candidate: Candidate) -> Tensor | None:
    """`[n, Hx, d]` vectors that the candidate says the projection became; None if its norm does not take that shape."""
    rows = candidate.product.rows
    assert rows is not None
    return _normed(candidate, candidate.layout.take(rows))


def _normed(candidate: Candidate, x: Tensor) -> Tensor | None:
    if candidate.norm is None:
        return x.float()
    shaped = x.flatten(1) if candidate.across else x.transpose(0, 1)  # [n, H*d] or, as in most code, [H, n, d]
    for form in (shaped,) if candidate.across else (shaped, x):
        try:
            y = candidate.norm.apply(form[None])[0]
        except (RuntimeError, ValueError):
            continue
        if y.shape == form.shape:
            y = y.reshape(x.shape) if candidate.across or form is x else y.transpose(0, 1)
            return y.float()
    return None


def _gain(candidate: Candidate) -> Tensor:
    """Learned gain of the norm, `[Hx, d]`: its response to a pattern of +1 and -1, whose mean is 0 and mean square 1.

    So it is found whatever the code calls it (w, 1 + w, scale * sqrt(d)); an L2 norm answers 1 / sqrt(size)."""
    heads, rows = candidate.layout.heads, candidate.product.rows
    assert rows is not None
    d = candidate.layout.take(rows[:1]).shape[-1]
    pattern = 1.0 - 2.0 * (torch.arange(heads * d, device=rows.device) % 2)
    x = pattern.to(rows.dtype).reshape(1, heads, d)
    up, down = _normed(candidate, x), _normed(candidate, -x)
    assert up is not None
    assert down is not None
    return ((up - down) / 2 * x)[0].float()


def _is_l2(norm: Norm) -> bool:
    return norm.label == "normalize" or "l2" in norm.label.lower()


def _kind(candidate: Candidate) -> str:
    """What a user calls the norm."""
    if candidate.norm is None:
        return ""
    label = candidate.norm.label.lower()
    kind = (
        "l2"
        if _is_l2(candidate.norm)
        else "rms"
        if "rms" in label
        else "layer"
        if "layer" in label
        else candidate.norm.label
    )
    return f"{kind} across heads" if candidate.across else f"{kind} per head"
