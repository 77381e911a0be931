"""What is known of a head at each sample: numbers of the weights hold until measured again or no longer proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.sample import Coverage, unproved

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run


def held(
    values: NDArray[np.float32], gone: NDArray[np.bool_] | None = None, rows: NDArray[np.integer] | None = None
) -> NDArray[np.float32]:
    """`[R, L, H]`: of `values [S, L, H]` what is known at samples `rows` (None: each), a head's last number.

    gone `[S, L]`: samples from which on what a layer's heads had before is known no more.
    """
    rows = np.arange(len(values)) if rows is None else rows
    measured = np.flatnonzero(~np.isnan(values).all(axis=(1, 2)))
    if not len(measured):
        return np.full((len(rows), *values.shape[1:]), np.nan, np.float32)
    known = values[measured]
    index = np.arange(len(measured), dtype=np.int32)[:, None, None]
    newest = np.maximum.accumulate(np.where(np.isnan(known), np.int32(-1), index), axis=0)
    last = np.searchsorted(measured, rows, side="right") - 1
    chosen = np.where(last[:, None, None] < 0, -1, newest[np.maximum(last, 0)])
    lost = chosen < 0
    if gone is not None:
        since = np.maximum.accumulate(np.where(gone, np.arange(len(values))[:, None], -1), axis=0)[rows]
        lost |= measured[chosen] < since[:, :, None]
    found = np.take_along_axis(known, np.maximum(chosen, 0), axis=0)
    return np.where(lost, np.float32(np.nan), found)


def forgotten(run: Run) -> NDArray[np.bool_] | None:
    """`[S, L]`: samples at which a layer's weights were found not to be proved; None when that never happened."""
    lost = [(step, unproved(layers)) for step, layers in run.coverages]
    if not any(names for _, names in lost):
        return None
    found = np.zeros((len(run.steps), len(run.layers)), np.bool_)
    column = {name: index for index, name in enumerate(run.layers)}
    # As the rule engine has it, a layer stays without a spectrum until the coverage says better.
    for (step, names), (until, _) in zip(lost, [*lost[1:], (None, ())], strict=True):
        rows = slice(*(None if at is None else int(np.searchsorted(run.steps, at)) for at in (step, until)))
        found[rows, [column[name] for name in names if name in column]] = True
    return found


class Proof(NamedTuple):
    """Of one layer. layer: as it was proved last. until: the step from which on it is not, None where it still is."""

    layer: Coverage
    until: int | None


def proofs(run: Run) -> dict[str, Proof]:
    """The layers that were verified at any time."""
    found: dict[str, Proof] = {}
    for step, layers in run.coverages:
        for layer in layers:
            if layer.state == "verified":
                found[layer.name] = Proof(layer, None)
            elif layer.name in found and found[layer.name].until is None:
                found[layer.name] = found[layer.name]._replace(until=step)
    return found


def is_held(run: Run, name: str) -> bool:
    """Whether a metric is one of the weights."""
    return any(metric.name == name and metric.merge == "last" for metric in run.metrics)
