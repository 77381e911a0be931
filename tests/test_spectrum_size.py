"""Spectra of large layers by way of their Gram matrices: what they cost, and where float32 does not resolve them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests import reference
from tests.devices import Watch
from tests.models import D, E, H, Mixer, Model, layer_of, parts, step, tokens, values_of
from tests.test_spectrum import NAMES, normal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attnwatch.hooks.probe import Probe
from attnwatch.hooks.spectrum import SPECTRUM, factors, spectra, spectrum

UNRESOLVED = [True] * 6 + [False] * 3 + [True] * 2
"""By name: what float32 Gram matrices leave unknown of a head with a small product. Its norms they give."""


def directions(rows: int, columns: int, seed: int) -> Tensor:
    """Orthonormal rows, float64."""
    turned: Tensor = torch.linalg.qr(normal(columns, rows, seed=seed)).Q.mT
    return turned


def head(sigma_q: Tensor, sigma_k: Tensor, turn: bool = False, d_in: int = 256) -> tuple[Tensor, Tensor]:
    """float32 `[1, d, d_in]` each, of these singular values, whose directions in the head are the same unless `turn`:
    then W_q^T W_k has the singular values `sigma_q * sigma_k`."""
    d = len(sigma_q)
    left = directions(d, d, seed=2)
    other = directions(d, d, seed=3) if turn else left
    w_q = left @ (sigma_q[:, None] * directions(d, d_in, seed=4))
    w_k = other @ (sigma_k[:, None] * directions(d, d_in, seed=5))
    return w_q[None].float(), w_k[None].float()


def expected(w_q: Tensor, w_k: Tensor) -> list[list[float]]:
    return list(reference.spectrum(w_q.double().numpy(), w_k.double().numpy()).values())


FALLING = torch.logspace(0, -6, 32, dtype=torch.float64)  # condition 1e6
CONDITIONED = {
    "aligned": head(FALLING, FALLING),
    "turned": head(FALLING, FALLING, turn=True),
    "opposed": head(FALLING, FALLING.flip(0)),  # every singular value of the product is a millionth of its bound
}


@pytest.mark.parametrize("way", CONDITIONED)
def test_condition_1e6_against_the_product_formed_outright(way: str) -> None:
    """Every number to 1e-4 of the float64 SVD; without `exact` too, or it says that it does not know."""
    w_q, w_k = CONDITIONED[way]
    true = expected(w_q, w_k)
    np.testing.assert_allclose(spectrum(w_q, w_k), true, rtol=1e-4)
    found = spectrum(w_q, w_k, exact=False)
    assert found.isnan()[:, 0].tolist() == (UNRESOLVED if way == "opposed" else [False] * len(SPECTRUM))
    known = ~found.isnan()
    np.testing.assert_allclose(found[known], torch.tensor(true, dtype=torch.float64)[known], rtol=1e-4)


@pytest.mark.parametrize(("rest", "resolved"), [(1.0, True), (0.3, True), (0.11, True), (0.09, False), (0.01, False)])
def test_a_tenth_of_the_bound_is_what_float32_resolves(rest: float, resolved: bool) -> None:
    """One direction of queries and another one of keys stands out: the product has `rest` of the bound everywhere."""
    sigma_q, sigma_k = torch.full((2, 48), rest, dtype=torch.float64)
    sigma_q[0], sigma_k[1] = 1, 1
    w_q, w_k = head(sigma_q, sigma_k)
    found, true = spectrum(w_q, w_k, exact=False), expected(w_q, w_k)
    assert true[NAMES.index("qk_sigma_max")] == pytest.approx([rest], rel=1e-5)
    assert found.isnan()[:, 0].tolist() == ([False] * len(SPECTRUM) if resolved else UNRESOLVED)
    known = ~found.isnan()
    np.testing.assert_allclose(found[known], torch.tensor(true, dtype=torch.float64)[known], rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "d", "d_in"), [(4, 4, 32, 512), (4, 2, 16, 1000), (3, 1, 64, 65)])
def test_many_heads_without_qr(heads: int, kv_heads: int, d: int, d_in: int) -> None:
    decay = torch.linspace(1, 0.05, d, dtype=torch.float64)[:, None]
    w_q, w_k = (normal(n, d, d_in, seed=n).mul(decay).float() for n in (heads, kv_heads))
    np.testing.assert_allclose(spectrum(w_q, w_k, exact=False), expected(w_q, w_k), rtol=1e-4)


def test_a_head_of_few_directions_is_right_or_unknown() -> None:
    """Three directions of 32: the Gram matrix is singular, to rounding."""
    sigma = torch.zeros(32, dtype=torch.float64)
    sigma[:3] = torch.tensor([3.0, 2.0, 1.0])
    w_q, w_k = head(sigma, torch.ones(32, dtype=torch.float64), turn=True)
    true = expected(w_q, w_k)
    np.testing.assert_allclose(spectrum(w_q, w_k), true, rtol=1e-4)
    found = spectrum(w_q, w_k, exact=False)
    known = ~found.isnan()
    np.testing.assert_allclose(found[known], torch.tensor(true, dtype=torch.float64)[known], rtol=1e-4)


def test_zeros_and_bad_numbers_without_qr() -> None:
    """Zeros have norms of 0 and no shares; a NaN is its own head's; numbers whose squares leave float32 are unknown."""
    w_q, w_k = normal(5, 8, 40).float(), normal(5, 8, 40, seed=1).float()
    good = spectrum(w_q, w_k, exact=False)
    w_q[1], w_k[2, 3, 4], w_q[3], w_k[4] = 0, math.nan, 1e25 * w_q[3], 1e-25 * w_k[4]
    found = spectrum(w_q, w_k, exact=False)
    assert found[0, 1] == found[6, 1] == 0
    assert found[1:6, 1].isnan().all()
    assert found[:6, 2:].isnan().all()
    torch.testing.assert_close(found[:9, 0], good[:9, 0])
    np.testing.assert_allclose(spectrum(w_q[3:], w_k[3:])[:9], expected(w_q[3:], w_k[3:])[:9], rtol=1e-4)


def test_two_gram_products_are_nearly_all_of_the_work() -> None:
    """Counted in floating-point operations of products: the rest is of the size of a head, not of its input."""
    w_q, w_k = normal(2, 16, 2048).float(), normal(2, 16, 2048).float()
    with FlopCounterMode(display=False) as grams:
        w_q @ w_q.mT, w_k @ w_k.mT
    with FlopCounterMode(display=False) as whole:
        spectrum(w_q.repeat(65, 1, 1), w_k.repeat(65, 1, 1), exact=False)  # too wide for values of the layer
    assert whole.get_total_flops() < 1.1 * 65 * grams.get_total_flops()


class Products(TorchDispatchMode):
    """dtypes of the matrix products over a long dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("bmm", "mm") and args[0].shape[-1] > 100:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "dtype"), [("highest", torch.float32), ("high", torch.float64)])
def test_products_that_training_rounds_further_are_not_used(precision: str, dtype: torch.dtype) -> None:
    """Where float32 products may be TF32 or bfloat16, Gram matrices are float64; the setting stays as it was."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with Products() as products:
            spectrum(normal(2, 16, 200).float(), normal(2, 16, 200).float(), exact=False)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert products.dtypes == {dtype}


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_waits_for_the_device(exact: bool) -> None:
    w_q, w_k = normal(4, 8, 200).float(), normal(2, 8, 200).float()
    with Watch() as watch:
        factors(w_q, w_k, exact)
    assert watch.largest <= 4 * 8 * 200


def test_layers_are_solved_together_as_each_by_itself() -> None:
    """Of three shapes, one of them twice."""
    layers = [
        factors(normal(heads, d, 40, seed=seed).float(), normal(2, d, 40, seed=seed + 9).float(), exact=seed > 1)
        for seed, (heads, d) in enumerate([(4, 8), (2, 16), (4, 8), (2, 48)])
    ]
    for found, layer in zip(spectra(layers), layers, strict=True):
        torch.testing.assert_close(found, spectra([layer])[0], rtol=1e-5, atol=0, equal_nan=True)


# --- in a model that trains -------------------------------------------------------------------------------------------


def test_a_layer_that_float32_does_not_resolve_is_measured_exactly_from_the_next_sample_on() -> None:
    """The first look leaves its head unknown and makes the layer due; the next one gives it, and no third is asked."""
    weights = parts()
    sigma = torch.logspace(0, -3, D, dtype=torch.float64)
    q, k = head(sigma, sigma.flip(0), d_in=E)
    weights.q[1], weights.k[1] = q[0], k[0]
    true = expected(weights.q, weights.k)
    assert true[0][1] == pytest.approx(1e-3 * true[8][1], rel=1e-3)
    model = Model(Mixer(weights)).train()
    probe = Probe(model, rows=None)
    reading = step(probe, model, tokens())
    assert layer_of(reading).state == "verified"
    assert [math.isnan(x) for x in values_of(reading)["qk_rank"]] == [n == 1 for n in range(H)]
    assert not np.isnan(values_of(reading)["qk_sigma_bound"]).any()
    assert probe.due
    reading = step(probe, model, tokens())
    for name, values in zip(NAMES, true, strict=True):
        np.testing.assert_allclose(values_of(reading)[name], values, rtol=1e-4, err_msg=name)
    assert not probe.due


def test_values_of_a_whole_wide_layer_come_with_every_fourth_look() -> None:
    """They cost more than all others together. Those of narrow layers come with every look."""
    for width, known in ((320, [True, False, False, False, True]), (256, [True] * 5)):
        layer = nn.TransformerEncoderLayer(width, 4, 8, dropout=0.0, batch_first=True).train()
        probe = Probe(layer, rows=2)
        readings = [step(probe, layer, normal(1, 3, width).float()) for _ in known]
        (name,) = readings[0].measured
        found = [values_of(reading, name) for reading in readings]
        assert [not np.isnan(values["layer_directions_90"]).any() for values in found] == known
        assert not any(np.isnan(values["qk_rank"]).any() for values in found)
