"""The spectrum of `W_q^T W_k` of every head, from the weights alone.

This is the operator of a query and a key at the same place: RoPE turns it with the offset, and the two spectral norms
bound it at every offset. The `d_in x d_in` product is never formed: its singular values are those of a `d x d` one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnwatch.hooks.eigen import effective_rank, eigenvalues
from attnwatch.hooks.statistics import Statistic

TOP = 10
ENERGY = 0.9
LAYER_WIDTH, LAYER_INPUT = 1024, 4096
"""Largest `H * d` and `d_in` of which whole-layer values are taken: their cost grows with the third power."""

RESOLVED = 0.01
"""Least energy of a product's first direction, over that of its bound, that float32 Gram matrices tell to 1e-4."""

RIDGE = {torch.float32: 5e-7, torch.float64: 1e-13}  # of the largest squared norm: above a Gram matrix's rounding
SMALLEST = 1e-30  # squared norm: below it squares of single weights begin to leave float32

SPECTRUM: tuple[Statistic, ...] = (
    Statistic("qk_sigma_max", "1", "Largest singular value of the head's W_q^T W_k.", "last"),
    Statistic("qk_energy_top1", "1", "Share of the energy of W_q^T W_k in its first direction.", "last"),
    Statistic("qk_energy_top10", "1", "Share of the energy of W_q^T W_k in its first ten directions.", "last"),
    Statistic("qk_directions_90", "directions", "Directions that hold 90 % of the energy of W_q^T W_k.", "last"),
    Statistic("qk_rank", "directions", "Effective rank of W_q^T W_k: exp of the entropy of its energy.", "last"),
    Statistic("qk_rank_ratio", "1", "Effective rank of W_q^T W_k over that of random weights of its shape.", "last"),
    Statistic("wq_sigma_max", "1", "Spectral norm of the head's W_q.", "last"),
    Statistic("wk_sigma_max", "1", "Spectral norm of the W_k of the head's key head.", "last"),
    Statistic("qk_sigma_bound", "1", "Product of both norms: bounds W_q^T W_k at every rotary offset.", "last"),
    Statistic(
        "layer_energy_top10",
        "1",
        "Share of energy in ten directions of the whole layer's W_q^T W_k; only of layers up to 1024 wide.",
        "last",
    ),
    Statistic(
        "layer_directions_90",
        "directions",
        "Directions that hold 90 % of the energy of the whole layer's W_q^T W_k; only of layers up to 1024 wide.",
        "last",
    ),
)

BOUND: tuple[Statistic, ...] = (
    Statistic("logit_bound", "1", "Largest logit that the head's query-key norm lets through.", "last"),
    Statistic("bound_use", "1", "Largest logit over the bound that the query-key norm sets.", "last"),
)


class Square(NamedTuple):
    """Gram matrices of some matrices, whose eigenvalues are the squares of the singular values of these.

    gram: float32 `[..., n, n]`, over its largest diagonal entry, which is size, `[...]`.
    """

    gram: Tensor
    size: Tensor


class Factors(NamedTuple):
    """A layer's weights, ready for their eigenvalues: q `[H]`, k `[Hk]`, heads `[H]` (of `W_q^T W_k`), layer `[]` (of
    all heads together; None: not taken). extents: largest magnitudes `[H]` and `[Hk]`. baseline: the effective rank
    that random weights of this shape have. exact: as `spectrum` was asked."""

    q: Square
    k: Square
    heads: Square
    layer: Square | None
    extents: tuple[Tensor, Tensor]
    baseline: float
    exact: bool

    @property
    def squares(self) -> list[Square]:
        return [self.q, self.k, self.heads, *([] if self.layer is None else [self.layer])]

    @property
    def bytes(self) -> int:
        return sum(square.gram.nbytes for square in self.squares)


def qk_statistics(w_q: Tensor, w_k: Tensor, *, heads: int, kv_heads: int | None = None) -> dict[str, Tensor]:
    """Every statistic of a layer's weights, by name: float32 `[H]`, NaN where undefined.

    w_q: `[H * d, d_in]`, w_k: `[Hk * d, d_in]`, as in `torch.nn.Linear`: head after head. Raises ValueError.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"expected heads to be a multiple of kv_heads; found heads={heads}, kv_heads={kv_heads}")
    for name, weight in (("w_q", w_q), ("w_k", w_k)):
        if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
            raise ValueError(
                f"expected {name} of shape [heads * d, d_in] and a float dtype; "
                f"found {list(weight.shape)} {weight.dtype}: pass the weight of the projection"
            )
    if w_q.shape[0] % heads or w_k.shape[0] % kv_heads or w_q.shape[0] // heads != w_k.shape[0] // kv_heads:
        raise ValueError(
            f"expected w_q of {heads} and w_k of {kv_heads} heads of the same width; found {w_q.shape[0]} and "
            f"{w_k.shape[0]} rows: check heads and kv_heads, or transpose the weights"
        )
    with torch.no_grad(), torch.autocast(w_q.device.type, enabled=False):
        values = spectrum(w_q.unflatten(0, (heads, -1)), w_k.unflatten(0, (kv_heads, -1))).float()
    return dict(zip([s.name for s in SPECTRUM], values.unbind(), strict=True))


def spectrum(w_q: Tensor, w_k: Tensor, exact: bool = True, whole: bool = True) -> Tensor:
    """float64 `[len(SPECTRUM), H]` of weights, as `factors` takes them. The host waits for the device."""
    return spectra([factors(w_q, w_k, exact, whole)])[0]


def factors(w_q: Tensor, w_k: Tensor, exact: bool = True, whole: bool = True) -> Factors:
    """Of `w_q [H, d, in_q]` and `w_k [Hk, d, in_k]`, with any QK-norm gain folded in. Nothing is read on the host.

    exact: good to float32 however small the product is against its factors, by QR. Without, a head whose product is
    below a tenth of their bound has only its norms, the rest NaN: Gram matrices in float32 do not resolve it.
    whole: with the values of the whole layer, which cost more than all the others; without, they are NaN.
    """
    d, in_q, in_k = w_q.shape[1], w_q.shape[2], w_k.shape[2]
    w_q, w_k = w_q.detach().float(), w_k.detach().float()
    gram = None if exact else gram_dtype()
    thin_q, thin_k = thin(w_q, gram), thin(w_k, gram)
    return Factors(
        square(thin_q),
        square(thin_k),
        square(product(thin_q, thin_k).flatten(0, 1)),
        _layer(w_q, w_k, gram or torch.float64) if whole else None,
        (extent(w_q), extent(w_k)),
        d * (1 + d / in_q) ** -0.6 * (1 + d / in_k) ** -0.6,
        exact,
    )


def spectra(layers: Sequence[Factors]) -> list[Tensor]:
    """float64 `[len(SPECTRUM), H]` of each layer, the eigenvalues of all at once. The host waits for the device.

    Weights of zeros have no shares of energy, non-finite ones no values: NaN.
    """
    found = iter(energies([square for layer in layers for square in layer.squares]))
    return [_values(layer, [next(found) for _ in layer.squares]) for layer in layers]


def _values(layer: Factors, energy: Sequence[Tensor]) -> Tensor:
    top_q, top_k, heads = energy[0][:, 0], energy[1][:, 0], energy[2]
    group = len(top_q) // len(top_k)
    known_q, known_k = (_known(size, top) for size, top in zip(layer.extents, (top_q, top_k), strict=True))
    known_k, top_k = known_k.repeat_interleave(group), top_k.repeat_interleave(group)
    rank = effective_rank(heads)
    head = torch.stack([heads[:, 0].sqrt(), *_concentration(heads), rank, rank / layer.baseline])
    resolved = known_q & known_k
    if not layer.exact:
        resolved &= heads[:, 0] >= RESOLVED * top_q * top_k
    norm_q, norm_k = torch.where(known_q, top_q.sqrt(), torch.nan), torch.where(known_k, top_k.sqrt(), torch.nan)
    whole = norm_q.new_full((2,), torch.nan) if layer.layer is None else torch.stack(_concentration(energy[3])[1:])
    return torch.cat([
        torch.where(resolved, head, torch.nan),
        torch.stack([norm_q, norm_k, norm_q * norm_k]),
        torch.where(resolved.all(), whole, torch.nan)[:, None].expand(-1, len(heads)),
    ])  # fmt: skip


def extent(w: Tensor) -> Tensor:
    """`[n]`: largest magnitude of each of `w [n, d, d_in]`; NaN or inf where one is. Makes no copy, as `abs` does."""
    flat = w.flatten(1)
    return torch.maximum(flat.amax(1), -flat.amin(1))


def _known(size: Tensor, top: Tensor) -> Tensor:
    """bool `[n]`: finite weights whose `thin` was found; that of zeros is 0."""
    return size.isfinite() & ((size > 0) == (top > 0))


def thin(w: Tensor, gram: torch.dtype | None = None) -> Tensor:
    """float64 `[n, min(d, d_in), d]`: the transpose of `w [n, d, d_in]` up to an orthogonal factor on its left.

    By QR, head by head: many at once are copied at once. With `gram` by Cholesky of Gram matrices computed in it: in
    float32 that takes a third of the time, and a tenth where other processes keep the cores busy. A tiny ridge keeps a
    singular weight's factor real. All 0 where a number is not finite, where the squares leave float32, or where the
    ridge was too small: what LAPACK gets next must hold no NaN.
    """
    if w.shape[-1] <= w.shape[-2]:
        found, fine = w.mT.double(), w.isfinite().all(-1).all(-1)
    elif gram is None:
        found = torch.stack([torch.linalg.qr(head.double().mT, mode="r").R for head in w])
        fine = found.isfinite().all(-1).all(-1)
    else:
        wide = w.to(gram)
        square = (wide @ wide.mT).double()
        diagonal = square.diagonal(dim1=-2, dim2=-1)
        size = diagonal.amax(-1, keepdim=True)
        diagonal.add_(RIDGE[gram] * size)
        lower, failed = torch.linalg.cholesky_ex(square)
        found, fine = lower.mT, (failed == 0) & size[:, 0].isfinite() & (size[:, 0] > SMALLEST)
    return torch.where(fine[:, None, None], found, 0.0)


def product(q: Tensor, k: Tensor) -> Tensor:
    """`[Hk, H / Hk, m, n]` of factors `q [H, m, d]` and `k [Hk, n, d]`: that of a key head is not repeated."""
    grouped: Tensor = q.unflatten(0, (len(k), -1)) @ k.mT[:, None]
    return grouped


def square(w: Tensor) -> Square:
    """Of `[..., m, n]`."""
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    size = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(gram.dtype).tiny)
    return Square((gram / size[..., None, None]).float(), size)


def energies(squares: Sequence[Square]) -> list[Tensor]:
    """float64 `[..., n]` each: squared singular values, largest first, good to float32 of the largest. The host waits.

    By eigenvalues: `svdvals` of such small matrices takes 200 times as long where other processes keep the cores busy.
    """
    found = eigenvalues([each.gram for each in squares], torch.float32)
    return [
        each.size[..., None].double() * energy.double().clamp(min=0).flip(-1)
        for each, energy in zip(squares, found, strict=True)
    ]


def gram_dtype() -> torch.dtype:
    """float32 if products of it are computed in it, and not in TF32 or bfloat16; else float64."""
    try:
        return torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
    except RuntimeError:  # set for one backend at a time: then torch has no one answer
        return torch.float64


def _concentration(energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share of the first direction, share of the first ten, directions of 90 %, of `[..., n]`, largest first."""
    total = energy.sum(-1)
    within = (energy.cumsum(-1) / total[..., None]).nan_to_num(nan=-1.0)
    directions = (within < ENERGY).sum(-1) + 1.0
    return energy[..., 0] / total, energy[..., :TOP].sum(-1) / total, torch.where(total > 0, directions, torch.nan)


def _layer(w_q: Tensor, w_k: Tensor, dtype: torch.dtype) -> Square | None:
    """Of the product of all heads together; None where the layer is too wide for it."""
    heads, d, in_q = w_q.shape
    if heads * d > LAYER_WIDTH or max(in_q, w_k.shape[2]) > LAYER_INPUT:
        return None
    # Repeating a key head for its group is the same product as adding up the group's query heads.
    group = heads // len(w_k)
    side_q, side_k = (_side(w.flatten(0, 1)).to(dtype) for w in (w_q.unflatten(0, (-1, group)).sum(1), w_k))
    return square((side_q @ side_k.mT).nan_to_num(nan=0.0))


def _side(w: Tensor) -> Tensor:
    """What `thin` gives of `w [m, d_in]`, over its largest magnitude; in float32 where it is `w` itself."""
    factor = w.mT if w.shape[1] <= w.shape[0] else thin(w[None])[0]
    return factor / factor.abs().amax()
