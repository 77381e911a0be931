"""Entropy of every row from the fused kernel's normalisers, against the maps themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests import reference
from tests.devices import Watch
from tests.models import Mixer, Model, parts, step, tokens, values_of
from tests.test_statistics import NAMES, named
from torch import Tensor

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.normalisers import allows, every_row
from attnwatch.hooks.probe import Probe
from attnwatch.hooks.statistics import measure, merge, sample_rows

EXACT = ("entropy", "entropy_ratio", "first_key_mass")


def made(batch: int, heads: int, kv_heads: int, length: int, d: int = 16, sharp: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(length)
    return sharp * torch.randn(batch, heads, length, d, generator=g), torch.randn(
        batch, kv_heads, length, d, generator=g
    )


@pytest.mark.parametrize("sharp", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(3, 3, 40), (4, 2, 129), (4, 1, 1000)])
def test_all_rows_without_a_map(heads: int, kv_heads: int, length: int, causal: bool, sharp: float) -> None:
    """Three means of every row, from a pair of seven rows, to 1e-5 of those over the maps; the others stay those of the
    seven. Grouped heads, sharp attention."""
    attention = Attention(*made(2, heads, kv_heads, length, sharp=sharp), causal=causal)
    some = measure(attention, [0, 1], sample_rows(length, 7, 0.3))
    found = named(every_row(attention, [0, 1], some))
    whole = named(measure(attention, [0, 1], range(length)))
    for name in NAMES:
        if name in EXACT:
            np.testing.assert_allclose(found[name], whole[name], atol=1e-5, rtol=1e-5, err_msg=name)
        else:
            torch.testing.assert_close(found[name], named(some)[name], rtol=0, atol=0, equal_nan=True)


def test_against_the_definitions() -> None:
    """A slow float64 reference, another scale, half precision."""
    q, k = (x.bfloat16() for x in made(1, 2, 2, 24))
    call: dict[str, Any] = {"q": q, "k": k, "causal": True, "scale": 0.4}
    attention = Attention(**call)
    found = named(every_row(attention, [0], measure(attention, [0], [20])))
    expected = reference.attention_statistics(**call)
    for name in EXACT:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


def test_merges_as_other_pairs_do() -> None:
    """Two micro-batches, sequence by sequence, are the batch."""
    attention = Attention(*made(2, 2, 2, 64), causal=True)
    pairs = [every_row(attention, [b], measure(attention, [b], [40, 60])) for b in (0, 1)]
    both = named(every_row(attention, [0, 1], measure(attention, [0, 1], [40, 60])))
    for name in EXACT:
        torch.testing.assert_close(named(merge(*pairs))[name], both[name])


def test_a_row_that_is_not_finite_is_left_out() -> None:
    q, k = made(1, 2, 2, 32)
    q[0, 1, 30] = torch.nan
    attention = Attention(q, k, causal=True)
    found = named(every_row(attention, [0], measure(attention, [0], [31])))
    whole = named(measure(attention, [0], range(32)))
    for name in EXACT:
        np.testing.assert_allclose(found[name], whole[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "other",
    [
        {"window": 4}, {"softcap": 5.0}, {"sinks": torch.zeros(2)}, {"mask": torch.ones(8, 8, dtype=torch.bool)},
        {"bias": torch.zeros(8, 8)}, {"scale": torch.ones(2)}, {"scores": torch.zeros(1, 2, 8, 8)},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_what_the_kernel_cannot_tell_stays_as_measured(other: dict[str, Any]) -> None:
    attention = Attention(*made(1, 2, 2, 8), **other)
    some = measure(attention, [0], [6])
    assert not allows(attention)
    assert every_row(attention, [0], some) is some


def test_causal_of_other_lengths_is_left_alone() -> None:
    """Kernels disagree on where the diagonal lies then."""
    q, k = made(1, 2, 2, 8)
    assert not allows(Attention(q[:, :, :5], k, causal=True))
    assert allows(Attention(q[:, :, :5], k))


def test_holds_no_map_and_waits_for_nothing() -> None:
    attention = Attention(*made(1, 2, 2, 600), causal=True)
    some, sequences = measure(attention, [0], [500]), torch.zeros(1, dtype=torch.int64)
    with Watch() as watch:
        every_row(attention, sequences, some)
    assert watch.largest <= 2 * 600 * 16


def test_a_probe_of_few_rows_knows_the_entropy_of_every_row() -> None:
    """In a model that trains: the three means of all rows, the rest of the three rows that were asked for."""
    weights = parts(bias=True)
    model = Model(Mixer(weights)).train()
    whole, some, found = (
        values_of(step(Probe(model, rows, every_row=every), model, tokens()))
        for rows, every in ((None, False), (3, False), (3, True))
    )
    for name in NAMES:
        expected = whole if name in EXACT else some
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)
    assert not np.allclose(some["entropy"], whole["entropy"], atol=1e-4)
