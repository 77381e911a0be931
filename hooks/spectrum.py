"""The spectrum of `W_q^T W_k` of every head, from the weights alone.

This is the operator of a query and a key at the same place: RoPE turns it with the offset, and the two spectral norms
bound it at every offset. The `d_in x d_in` product is never formed: its singular values are those of a `d x d` one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnwatch.hooks.maps import effective_rank
from attnwatch.hooks.statistics import Statistic

TOP = 10
ENERGY = 0.9
LAYER_WIDTH, LAYER_INPUT = 1024, 4096
"""Largest `H * d` and `d_in` of which whole-layer values are taken: their cost grows with the third power."""

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


def spectrum(w_q: Tensor, w_k: Tensor) -> Tensor:
    """float64 `[len(SPECTRUM), H]` of `w_q [H, d, in_q]` and `w_k [Hk, d, in_k]`, with any QK-norm gain folded in.

    Nothing is read on the host here. Weights of zeros have no shares of energy, non-finite ones no values: NaN.
    """
    heads, d, in_q = w_q.shape
    in_k = w_k.shape[2]
    group = heads // w_k.shape[0]
    w_q, finite_q, size_q = _clean(w_q)
    w_k, finite_k, size_k = _clean(w_k)
    finite_k = finite_k.repeat_interleave(group)
    finite = finite_q & finite_k

    energy = energies(product(thin(w_q), thin(w_k))).flatten(0, 1)
    rank = effective_rank(energy)
    baseline = d * (1 + d / in_q) ** -0.6 * (1 + d / in_k) ** -0.6
    head = torch.stack([energy[:, 0].sqrt() * size_q * size_k, *_concentration(energy), rank, rank / baseline])
    norm_q = torch.where(finite_q, energies(w_q)[:, 0].sqrt() * size_q, torch.nan)
    norm_k = torch.where(finite_k, (energies(w_k)[:, 0].sqrt() * size_k).repeat_interleave(group), torch.nan)
    layer = _layer(w_q, w_k, group)
    return torch.cat([
        torch.where(finite, head, torch.nan),
        torch.stack([norm_q, norm_k, norm_q * norm_k]),
        torch.where(finite.all(), layer, torch.nan)[:, None].expand(-1, heads),
    ])  # fmt: skip


def _clean(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 weights over their size, 0 in heads that are not finite; bool `[H]`: finite heads; the size, 0-d.

    LAPACK raises on NaN, and on the infinities that products of a diverged run's weights become.
    """
    w = w.detach().float()
    finite = w.isfinite().flatten(1).all(1)
    w = torch.where(finite[:, None, None], w, 0.0)
    size = w.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return w / size, finite, size.double()


def thin(w: Tensor) -> Tensor:
    """`[..., min(d, d_in), d]`: the transpose of `w [..., d, d_in]` up to an orthogonal factor on its left.

    By Cholesky of the float64 Gram matrix: QR of many small factors is five times slower, and fifty times where other
    processes keep the cores busy. The tiny ridge keeps a singular weight's factor finite; it is 1e-13 of the energy.
    """
    if w.shape[-1] <= w.shape[-2]:
        return w.mT
    wide = w.double()
    gram = wide @ wide.mT
    ridge = 1e-13 * gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge.clamp_min(1e-200))
    lower: Tensor = torch.linalg.cholesky_ex(gram).L
    return lower.mT.float()


def product(q: Tensor, k: Tensor) -> Tensor:
    """`[Hk, H / Hk, m, n]` of factors `q [H, m, d]` and `k [Hk, n, d]`: that of a key head is not repeated."""
    grouped: Tensor = q.unflatten(0, (len(k), -1)) @ k.mT[:, None]
    return grouped


def energies(w: Tensor) -> Tensor:
    """float64 squared singular values of `[..., m, n]`, largest first, good to float32 of the largest.

    By eigenvalues: `svdvals` of such small matrices takes 200 times as long where other processes keep the cores busy.
    """
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    energy: Tensor = torch.linalg.eigvalsh(gram)
    return energy.double().clamp(min=0).flip(-1)


def _concentration(energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share of the first direction, share of the first ten, directions of 90 %, of `[..., n]`, largest first."""
    total = energy.sum(-1)
    within = (energy.cumsum(-1) / total[..., None]).nan_to_num(nan=-1.0)
    directions = (within < ENERGY).sum(-1) + 1.0
    return energy[..., 0] / total, energy[..., :TOP].sum(-1) / total, torch.where(total > 0, directions, torch.nan)


def _layer(w_q: Tensor, w_k: Tensor, group: int) -> Tensor:
    """float64 `[2]`: energy in ten directions and directions of 90 % of the product of all heads."""
    heads, d, in_q = w_q.shape
    if heads * d > LAYER_WIDTH or max(in_q, w_k.shape[2]) > LAYER_INPUT:
        return torch.full((2,), torch.nan, dtype=torch.float64, device=w_q.device)
    # Repeating a key head for its group is the same product as adding up the group's query heads.
    thin_q = thin(w_q.unflatten(0, (-1, group)).sum(1).flatten(0, 1))
    core = thin_q @ thin(w_k.flatten(0, 1)).mT
    return torch.stack(_concentration(energies(core))[1:])
