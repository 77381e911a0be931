"""The spectra of `W_q^T W_k` against worked values, Monte Carlo figures and the product formed outright."""

from __future__ import annotations

import math

import pytest
import torch
from tests import reference
from tests.devices import Watch
from torch import Tensor

from attnwatch.hooks.spectrum import SPECTRUM, factors, qk_statistics, spectrum

NAMES = [s.name for s in SPECTRUM]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_agrees(w_q: Tensor, w_k: Tensor) -> None:
    found = dict(zip(NAMES, spectrum(w_q.float(), w_k.float()), strict=True))
    expected = reference.spectrum(w_q.float().double().numpy(), w_k.float().double().numpy())
    for name in NAMES:
        assert found[name].tolist() == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "in_q", "in_k"),
    [
        (1, 1, 1, 1, 1), (3, 3, 4, 20, 20), (4, 4, 8, 32, 32), (6, 2, 5, 40, 40), (4, 1, 8, 24, 24), (2, 2, 16, 40, 23),
        (2, 2, 12, 5, 5), (4, 2, 12, 7, 30), (8, 8, 16, 128, 128), (2, 1, 6, 12, 6), (3, 1, 20, 15, 64),
    ],
)  # fmt: skip
def test_agrees_with_the_product_formed_outright(heads: int, kv_heads: int, d: int, in_q: int, in_k: int) -> None:
    """Grouped heads, cross-attention, heads wider than their input; the spectra decay, as trained ones do."""
    decay = torch.linspace(1, 0.05, d, dtype=torch.float64)[:, None]
    w_q = normal(heads, d, in_q, seed=d) * decay
    w_k = normal(kv_heads, d, in_k, seed=d + 1) * decay
    assert_agrees(w_q, w_k)


def test_agrees_where_weights_are_ill_conditioned() -> None:
    """Factors of condition 1e6: energies hold, though the product's condition is 1e12."""
    sigma = torch.logspace(0, -6, 16, dtype=torch.float64)[:, None]
    q_in = torch.linalg.qr(normal(64, 16)).Q.mT
    k_in = torch.linalg.qr(normal(64, 16, seed=1)).Q.mT
    turn = torch.linalg.qr(normal(16, 16, seed=2)).Q
    assert_agrees((turn @ (sigma * q_in))[None], (turn @ (sigma * k_in))[None])


def test_identity_weights() -> None:
    """All directions alike: rank d, ten of them hold 10/d, nine tenths take 0.9 d."""
    found = qk_statistics(torch.eye(20), torch.eye(20), heads=1)
    assert found["qk_sigma_max"].item() == pytest.approx(1)
    assert found["qk_rank"].item() == pytest.approx(20)
    assert found["qk_energy_top1"].item() == pytest.approx(0.05)
    assert found["qk_energy_top10"].item() == pytest.approx(0.5)
    assert found["qk_rank_ratio"].item() == pytest.approx(2**1.2)
    assert found["layer_energy_top10"].item() == pytest.approx(0.5)


def test_rank_one_queries() -> None:
    w_q = normal(16, 1) @ normal(1, 48, seed=1)
    found = qk_statistics(w_q.float(), normal(16, 48, seed=2).float(), heads=1)
    assert found["qk_rank"].item() == pytest.approx(1, abs=1e-4)
    assert found["qk_energy_top1"].item() == pytest.approx(1, abs=1e-5)
    assert found["qk_directions_90"].item() == 1
    assert found["layer_directions_90"].item() == 1


def test_directions_by_hand() -> None:
    """Energies 4, 3, 2, 1 of 10: three hold exactly 90 %; singular values are the square roots."""
    w_q = torch.diag(torch.tensor([4.0, 3.0, 2.5, 0.5]).sqrt())
    found = qk_statistics(w_q, torch.eye(4), heads=1)
    assert found["qk_directions_90"].item() == 3
    assert found["qk_energy_top1"].item() == pytest.approx(0.4)
    assert found["qk_sigma_max"].item() == pytest.approx(2)
    assert found["wq_sigma_max"].item() == pytest.approx(2)
    assert found["wk_sigma_max"].item() == pytest.approx(1)
    entropy = -(0.4 * math.log(0.4) + 0.3 * math.log(0.3) + 0.25 * math.log(0.25) + 0.05 * math.log(0.05))
    assert found["qk_rank"].item() == pytest.approx(math.exp(entropy), rel=1e-5)


@pytest.mark.parametrize("d_in", [64, 256, 768])
def test_random_weights_have_rank_ratio_one(d_in: int) -> None:
    """The mean of Gaussian heads is within 3 %; of 64 x 768 heads the concentration is known too."""
    found = qk_statistics(normal(16 * 64, d_in).float(), normal(16 * 64, d_in, seed=1).float(), heads=16)
    assert found["qk_rank_ratio"].mean().item() == pytest.approx(1, abs=0.03)
    if d_in == 768:
        assert found["qk_rank_ratio"].tolist() == pytest.approx([1] * 16, abs=0.03)
        assert found["qk_directions_90"].tolist() == pytest.approx([52] * 16, abs=1)
        assert found["qk_energy_top10"].tolist() == pytest.approx([0.27] * 16, abs=0.02)


def test_scale_of_the_weights_only_scales_the_norms() -> None:
    """Weights so large or small that products leave float32."""
    w_q, w_k = normal(8, 24).float(), normal(8, 24, seed=1).float()
    plain = qk_statistics(w_q, w_k, heads=2)
    for factor in (1e-15, 1e15):
        scaled = qk_statistics(factor * w_q, factor * w_k, heads=2)
        for name in NAMES:
            power = {"qk_sigma_max": 2, "qk_sigma_bound": 2, "wq_sigma_max": 1, "wk_sigma_max": 1}.get(name, 0)
            torch.testing.assert_close(scaled[name], plain[name] * factor**power, rtol=1e-4, atol=0, msg=name)


def test_weights_of_zeros_have_norms_but_no_shares() -> None:
    found = qk_statistics(torch.zeros(8, 12), normal(8, 12).float(), heads=2)
    assert found["qk_sigma_max"].tolist() == [0, 0]
    assert found["wq_sigma_max"].tolist() == [0, 0]
    assert (found["wk_sigma_max"] > 0).all()
    assert found["qk_sigma_bound"].tolist() == [0, 0]
    for name in NAMES[1:6] + NAMES[9:]:
        assert found[name].isnan().all(), name


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_weight_makes_its_own_head_unknown(poison: float) -> None:
    """One NaN in one key head: its two query heads and the layer are NaN, the others keep their values."""
    w_q, w_k = normal(16, 12).float(), normal(8, 12, seed=1).float()
    good = qk_statistics(w_q, w_k, heads=4, kv_heads=2)
    w_k[5, 3] = poison
    bad = qk_statistics(w_q, w_k, heads=4, kv_heads=2)
    for name in NAMES[:9]:
        unknown = [False] * 4 if name == "wq_sigma_max" else [False, False, True, True]
        assert bad[name].isnan().tolist() == unknown, name
        torch.testing.assert_close(bad[name][:2], good[name][:2], rtol=1e-5, atol=0)
    assert bad["layer_energy_top10"].isnan().all()


def test_wide_layers_have_no_layer_values() -> None:
    found = qk_statistics(normal(1032, 16).float(), normal(1032, 16).float(), heads=129)
    assert found["layer_energy_top10"].isnan().all()
    assert not found["qk_rank"].isnan().any()


def test_never_waits_for_the_device_nor_forms_the_product() -> None:
    """Nothing is read on the host, no random number drawn, nothing made as large as `d_in x d_in`."""
    w_q, w_k = normal(4, 8, 200).float(), normal(2, 8, 200).float()
    state = torch.get_rng_state()
    with Watch() as watch:
        factors(w_q, w_k)
    assert torch.equal(torch.get_rng_state(), state)
    assert watch.largest <= 4 * 8 * 200


def test_half_precision_weights_that_require_grad() -> None:
    w_q = normal(8, 24).bfloat16().requires_grad_()
    found = qk_statistics(w_q, w_q, heads=2)
    exact = reference.spectrum(*[w_q.detach().double().view(2, 4, 24).numpy()] * 2)
    for name in NAMES:
        assert found[name].dtype == torch.float32
        assert not found[name].requires_grad
        assert found[name].tolist() == pytest.approx(exact[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("shapes", "heads", "kv_heads", "words"),
    [
        ([(8, 4), (8, 4)], 3, None, "heads of the same width"),
        ([(8, 4), (8, 4)], 4, 3, "multiple of kv_heads"),
        ([(8, 4), (8, 4)], 4, 2, "heads of the same width"),
        ([(8, 4), (2, 4, 4)], 2, None, "w_k of shape"),
        ([(0, 4), (8, 4)], 2, None, "w_q of shape"),
        ([(8, 4), (8, 4)], 0, None, "multiple of kv_heads"),
    ],
)
def test_wrong_use_says_what_to_do_in_one_line(
    shapes: list[tuple[int, ...]], heads: int, kv_heads: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        qk_statistics(torch.ones(shapes[0]), torch.ones(shapes[1]), heads=heads, kv_heads=kv_heads)
    assert "\n" not in str(raised.value)
