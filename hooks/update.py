"""What one optimizer step did to `W_q^T W_k` of every head: its weights are kept from the forward until after the step.

The change has a rank of at most `2 d`: neither it nor the product is ever formed at `d_in x d_in`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnwatch.hooks.eigen import effective_rank
from attnwatch.hooks.sharded import local
from attnwatch.hooks.spectrum import energies, extent, gram_dtype, product, square, thin
from attnwatch.hooks.statistics import Statistic

UPDATE: tuple[Statistic, ...] = (
    Statistic("update_ratio", "1", "Spectral norm of a step's change of W_q^T W_k over that of W_q^T W_k.", "last"),
    Statistic("update_rank", "directions", "Effective rank of a step's first-order change of W_q^T W_k.", "last"),
)

Reader = Callable[[], Tensor]
"""Reads a side's weights `[Hx, d, in]`, float32, as they are now."""


class Kept(NamedTuple):
    """Query and key weights of one layer as they were in the forward, and how to read them again."""

    before: tuple[Tensor, Tensor]
    after: tuple[Reader, Reader]

    @property
    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.before)


def keep(w_q: Tensor, w_k: Tensor, read_q: Reader | None, read_k: Reader | None) -> Kept | None:
    """Copies of weights `[Hx, d, in]`, perhaps of fewer features than are read; None if they cannot be read again."""
    return None if read_q is None or read_k is None else Kept((w_q.clone(), w_k.clone()), (read_q, read_k))


def reader(weight: Tensor, module: nn.Module, fold: Callable[[Tensor], Tensor]) -> Reader | None:
    """`fold` of a weight, anew at each call; None unless it is, or is a view of, a plain parameter of the module.

    A sharded parameter is whole only during the forward; one that was freed since reads as NaN."""
    storage = weight.untyped_storage()
    if type(weight) is not Tensor or storage.data_ptr() not in {_address(p) for p in module.parameters()}:
        return None
    shape = fold(weight).shape
    return lambda: fold(weight) if storage.nbytes() else weight.new_full(shape, torch.nan, dtype=torch.float32)


def _address(parameter: nn.Parameter) -> int:
    address: int = local(parameter).untyped_storage().data_ptr()
    return address


def change(kept: Kept) -> Tensor:
    """`update` of the step that was made since. The host waits for the device."""
    steps = [read()[:, : w.shape[1]] - w for w, read in zip(kept.before, kept.after, strict=True)]
    return update(*kept.before, *steps)


def update(w_q: Tensor, w_k: Tensor, dw_q: Tensor, dw_k: Tensor) -> Tensor:
    """float64 `[len(UPDATE), H]` of weights `w_q [H, d, in_q]`, `w_k [Hk, d, in_k]` and their changes, shaped alike.

    NaN where nothing changed, where the product is 0, and where a number is not finite. Good to 1e-3 whatever the
    weights' condition and the step's rank, mostly to 1e-5: a factor's squares are rounded to float32.
    """
    a, da, known_q = _factor(w_q, dw_q)
    b, db, known_k = _factor(w_k, dw_k)
    first = product(da, b) + product(a, db)
    steps = torch.stack([first + product(da, db), first]).flatten(1, 2)
    energy, whole = energies([square(steps), square(product(_own(a, w_q), _own(b, w_k)).flatten(0, 1))])
    ratio = (energy[0, :, 0] / whole[:, 0]).sqrt()
    known = known_q & known_k.repeat_interleave(len(w_q) // len(w_k)) & (ratio > 0)
    return torch.where(known, torch.stack([ratio, effective_rank(energy[1])]), torch.nan)


def _factor(w: Tensor, dw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight and its change `[n, d, in]` as `[n, m, d]` each, m at most 2d, in one basis of the inputs that both use;
    both over the head's size. bool `[n]`: heads that are finite and not 0."""
    d, size, step = w.shape[1], extent(w), extent(dw)
    known = (size + step).isfinite() & (size > 0)
    # Each at a size of 1: a change is thousands of times smaller than its weight, and would drown in the rounding.
    both = torch.cat([w, dw], 1)
    both[:, :d] /= size[:, None, None]
    both[:, d:] /= torch.where(step > 0, step, 1.0)[:, None, None]
    factor = thin(both, gram_dtype()).float()
    return factor[..., :d], factor[..., d:] * torch.where(known, step / size, 0.0)[:, None, None], known


def _own(factor: Tensor, w: Tensor) -> Tensor:
    """The rows of the factor `[n, m, d]` of a weight `[n, d, in]` that are not 0 in the basis that it shares with its
    change: of a triangular one, m of `2d`, its first d. Of no more than `2d` inputs the basis is theirs."""
    d, inputs = w.shape[1:]
    return factor[:, :d] if inputs > 2 * d else factor
