"""Which rows of which weight are head h's W_q and W_k: guessed from names and shapes, then proved, never assumed.

Candidates pair a projection seen in the layer with a layout of its output and, if the layer normalises, a norm. Each
makes some tokens' vectors from the projection's real output; the one whose vectors are the captured q (or k), up to a
rotary embedding and a constant, is right. Only the best guess is used in the same step; the proof is read afterwards.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.layouts import Layout, Shape, layouts
from attnwatch.hooks.proof import mismatch, token_rows
from attnwatch.hooks.sharded import local
from attnwatch.hooks.tap import Frame, Norm, Product
from attnwatch.hooks.update import Reader, reader

MAX_CANDIDATES = 64


class Key(NamedTuple):
    """Identity of a proved choice from step to step. projection, norm: which of those that the layer called (-1: none);
    names do not tell them apart where weights are shared. parts: into how many ranks split the projection's heads."""

    weight: str
    layout: str
    projection: int
    norm: int
    across: bool
    sequence_first: bool
    parts: int


class Candidate(NamedTuple):
    key: Key
    product: Product
    layout: Layout
    norm: Norm | None

    @property
    def across(self) -> bool:
        """Whether the norm is taken over all heads together."""
        return self.key.across


class Side(NamedTuple):
    """One side's weights (queries or keys) as of this step, and how good each choice was.

    keys: one a choice; a pair where two streams of tokens have projections of their own. errors: `[n]` on the device,
    one a key. weight: `[Hx, d, in]` of the first choice, gain folded in. reach: `[Hx]`, the largest length a vector can
    have after the norm (None without one). kinds, heads: norm and heads of each choice. read: the weight as it is
    later, with the gain of this step.
    """

    keys: tuple[Any, ...]
    errors: Tensor
    weight: Tensor
    reach: Tensor | None
    kinds: tuple[str, ...]
    heads: tuple[int, ...]
    read: Reader | None


def look(shape: Shape, x: Tensor, frame: Frame, known: Any = None) -> Side | None:
    """The weights behind queries or keys `x [B, Hx, T, d]`, or None if no projection fits.

    known: the choice proved before, looked for first. No host synchronisation.
    """
    side = _look(shape, x, frame, known)
    if side is not None:
        return side
    found = None
    lengths = {product.tokens // len(x) for product in frame.products if product.tokens % len(x) == 0}
    for length in sorted(lengths):  # joint attention over two streams of tokens, one behind the other
        if x.shape[2] - length in lengths:
            firsts, seconds = known if known is not None and not isinstance(known, Key) else (None, None)
            first = _look(shape, x[:, :, :length], frame, firsts)
            second = _look(shape, x[:, :, length:], frame, seconds)
            if first is not None and second is not None:
                joint = _join(first, second)
                found = joint if found is None else _either(found, joint)
    return found


def _look(shape: Shape, x: Tensor, frame: Frame, known: Any) -> Side | None:
    found = _candidates(shape, x, frame)
    found = [candidate for candidate in found if candidate.key == known] or found
    kept: list[Candidate] = []
    errors, ratios = [], []
    for candidate in found:
        if len(kept) == MAX_CANDIDATES:
            break
        made = _make(candidate)
        if made is not None:
            real, position = token_rows(x, candidate.product.stride, made.shape[0], candidate.key.sequence_first)
            error, ratio = mismatch(real[..., : candidate.layout.size], made, position)
            kept.append(candidate)
            errors.append(error)
            ratios.append(ratio)
    if not kept:
        return None
    first = kept[0]
    weight = _heads_of(first, first.product.weight)
    reach, factor = None, None
    if first.norm is not None:
        gain = _gain(first)
        size = gain.numel() if first.across else gain.shape[-1]
        peak = gain.abs().max() if first.across else gain.abs().amax(-1)
        peak = peak.expand(weight.shape[0]) if peak.dim() == 0 else peak
        reach = ratios[0].abs() * size**0.5 * peak.repeat_interleave(x.shape[1] // weight.shape[0])
        factor = (gain * size**0.5 if _is_l2(first.norm) else gain).unsqueeze(-1)
        weight = weight * factor

    def fold(weight: Tensor) -> Tensor:
        return _heads_of(first, weight) if factor is None else _heads_of(first, weight) * factor

    return Side(
        tuple(c.key for c in kept),
        torch.stack(errors),
        weight,
        reach,
        tuple(_kind(c) for c in kept),
        tuple(c.layout.heads // c.layout.times for c in kept),
        reader(first.product.weight, frame.module, fold),
    )


def _heads_of(candidate: Candidate, weight: Tensor) -> Tensor:
    """float32 `[Hx, d, in]` of `[out, in]`."""
    return candidate.layout.take(weight.t().float()).permute(1, 2, 0)


def over_channels(frame: Frame, attention: Attention) -> bool:
    """Whether the projections speak of attention over channels: what looks like features counts their tokens."""
    q = attention.q
    if q is None or q.shape[2] == q.shape[3] or q.shape[2] != attention.keys:
        return False
    heads, channels, length = q.shape[1:]
    fitting = [p for p in frame.products if p.tokens == len(q) * length and p.weight.shape[0] % (heads * channels) == 0]
    return bool(fitting) and not any(p.tokens == len(q) * channels for p in frame.products)


def describe(key: Any) -> str:
    """What a choice is, in words."""
    return f"{key.weight} ({key.layout})" if isinstance(key, Key) else " and ".join(describe(part) for part in key)


def _join(first: Side, second: Side) -> Side:
    """Two streams: every pair of their choices, the operator on both inputs side by side."""
    pairs = [(i, j) for i in range(len(first.keys)) for j in range(len(second.keys))][: MAX_CANDIDATES**2]
    errors = torch.maximum(first.errors[:, None], second.errors[None, :]).flatten()[: len(pairs)]
    reach = None if first.reach is None or second.reach is None else torch.maximum(first.reach, second.reach)
    one, two = first.read, second.read
    return Side(
        tuple((first.keys[i], second.keys[j]) for i, j in pairs),
        errors,
        torch.cat([first.weight, second.weight], -1),
        reach,
        tuple(first.kinds[i] if first.kinds[i] == second.kinds[j] else "mixed" for i, j in pairs),
        tuple(first.heads[i] for i, _ in pairs),
        None if one is None or two is None else lambda: torch.cat([one(), two()], -1),
    )


def _either(one: Side, other: Side) -> Side:
    return Side(
        one.keys + other.keys,
        torch.cat([one.errors, other.errors]),
        one.weight,
        one.reach,
        one.kinds + other.kinds,
        one.heads + other.heads,
        one.read,
    )


# --- candidates ---------------------------------------------------------------------------------------------------


def _candidates(shape: Shape, x: Tensor, frame: Frame) -> list[Candidate]:
    """Best guess first: names that say query or key, norms if the layer has any; common layouts of all of them before
    rare layouts of any, so that two streams with four norms do not crowd out each other."""
    batch, _, length, d = x.shape
    names = {local(p).untyped_storage().data_ptr(): name for name, p in frame.module.named_parameters()}
    views = _views(frame.module)
    # A sharded weight may be gone by now, with the end of its own module's forward.
    products = [(i, product) for i, product in enumerate(frame.products) if product.weight.untyped_storage().nbytes()]
    named = [(i, product, _name(product, names, views)) for i, product in products if product.tokens == batch * length]
    named.sort(key=lambda entry: not _says(shape.side, entry[2]))
    found: list[tuple[int, Candidate]] = []
    for at, norm, across in _norms(shape.side, frame.norms, d):
        for i, product, name in named:
            if norm is not None and norm.at < product.at:
                continue  # of the projection's input
            orders = (True, False) if tuple(product.lead) == (length, batch) and batch != length else (False, True)
            for rank, layout in enumerate(layouts(shape, product.weight.shape[0], name)):
                whole = layout.heads * layout.size
                if norm is not None and norm.size not in ((whole,) if across else (0, layout.size, whole)):
                    continue
                for late, sequence_first in enumerate(orders if batch > 1 and length > 1 else (False,)):
                    key = Key(name, layout.label, i, at, across, sequence_first, product.parts)
                    rarity = rank + 4 * late + 8 * (at == len(frame.norms))  # a norm that nothing tells of comes last
                    found.append((rarity, Candidate(key, product, layout, norm)))
    return [candidate for _, candidate in sorted(found, key=lambda entry: entry[0])]


def _views(module: torch.nn.Module) -> dict[tuple[int, torch.Size], str]:
    """Names of parameters that stand as plain tensors while they are whole, by address and shape: views of a flat one
    (FullyShardedDataParallel), what DDP makes of split ones."""
    return {
        (local(value).data_ptr(), local(value).shape): f"{name}.{attribute}".lstrip(".")
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, Tensor) and value.dim() == 2
    }


def _name(product: Product, names: dict[int, str], views: dict[tuple[int, torch.Size], str]) -> str:
    weight = product.weight
    known = product.name or views.get((weight.data_ptr(), weight.shape))
    if known:
        return known
    name = names.get(weight.untyped_storage().data_ptr(), "?")
    return f"{name}+{weight.storage_offset()}" if weight.storage_offset() else name


def _says(side: str, name: str) -> bool:
    return side in re.sub(r"^.*block|^.*kernel", "", name.lower())


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _norms(side: str, norms: list[Norm], d: int) -> list[tuple[int, Norm | None, bool]]:
    """Norms that may stand between projection and product, the place of each, and whether over all heads; queries are
    normed first. One written out as a division by the length is in no place."""
    fitting = [(at, norm) for at, norm in enumerate(norms) if norm.size % d == 0]
    if side == "k":
        fitting.reverse()
    fitting.sort(key=lambda entry: entry[1].functional)
    found = [(at, norm, across) for at, norm in fitting for across in ((True, False) if norm.size > d else (False,))]
    return [*found, (-1, None, False), (len(norms), Norm("normalize", _unit, d, True), False)]


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
