"""What the largest logits of a row tell: sharpness at a longer context, ties, outlier coordinates, QK-Clip."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models import D, E, H, Mixer, Model, T, parts, tokens, values_of
from torch import Tensor

import attnwatch
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.probe import Probe
from attnwatch.hooks.statistics import ATTENTION, attention_statistics, finish, measure, merge

NAMES = [s.name for s in ATTENTION]


def of_scores(*rows: list[float], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Statistics of one head whose rows have these logits, computed in `dtype` by the model."""
    attention = Attention(None, None, scores=torch.tensor(rows)[None, None], dtype=dtype)
    values = finish(measure(attention, [0], list(range(len(rows)))))[:, 0]
    return dict(zip(NAMES, values.tolist(), strict=True))


def of_pair(q: list[list[float]], k: list[list[float]]) -> dict[str, float]:
    found = attention_statistics(torch.tensor(q)[None, None], torch.tensor(k)[None, None], scale=1.0)
    return {name: float(value) for name, value in found.items()}


# --- forecast_sharpness -----------------------------------------------------------------------------------------------


def test_forecast_by_hand() -> None:
    """Spreads 0 and ln 3: at 12 keys no weight can pass 1/12 and 3/12; at 2 keys 1/2, and 3/2 is cut to 1."""
    q, k = torch.tensor([[0.0], [math.log(3)]])[None, None], torch.tensor([[0.0], [1.0]])[None, None]
    for context, expected in ((12, (1 / 12 + 3 / 12) / 2), (2, (1 / 2 + 1) / 2)):
        found = attention_statistics(q, k, scale=1.0, context=context)
        assert found["forecast_sharpness"].item() == pytest.approx(expected, rel=1e-6)


def test_without_a_context_there_is_no_forecast() -> None:
    q = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(0))
    assert attention_statistics(q, q, causal=True)["forecast_sharpness"].isnan().all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), keys=st.integers(2, 40), sharp=st.floats(0.01, 20), sink=st.booleans())
def test_the_forecast_bounds_every_attention_map_of_that_length(seed: int, keys: int, sharp: float, sink: bool) -> None:
    """At the context that is there already the mean of the largest weights stays below it, with a learned sink too."""
    g = torch.Generator().manual_seed(seed)
    q, k = sharp * torch.randn(1, 2, 5, 4, generator=g), torch.randn(1, 2, keys, 4, generator=g)
    sinks = torch.randn(2, generator=g) if sink else None
    logits = q @ k.mT / 2
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, 2, 1, 1).expand(1, 2, 5, 1)], -1)
    largest = logits.softmax(-1)[..., :keys].amax(-1).mean((0, 2))
    bound = attention_statistics(q, k, sinks=sinks, context=keys)["forecast_sharpness"]
    assert (largest <= bound * (1 + 1e-5)).all()


def test_watch_takes_the_context(tmp_path: Path) -> None:
    """It reaches the statistics and run.json; a wrong one is refused in one line."""
    model = Model(Mixer(parts())).train()
    with attnwatch.watch(model, run=tmp_path / "run", rows=None, context=1000, report=False) as monitor:
        model(tokens()).sum().backward()
        monitor.step()
    assert monitor.last is not None
    found = monitor.last["forecast_sharpness"]
    assert ((found > 1e-3) & (found < 1)).all()
    assert attnwatch.open_run(tmp_path / "run").header["options"]["context"] == 1000
    for wrong in (1, 2.5, True):
        with pytest.raises(attnwatch.UsageError, match=f"at least 2 keys, found {wrong}"):
            attnwatch.watch(model, run=tmp_path / "none", context=wrong)  # type: ignore[arg-type]


# --- tied_rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "dtype", "tied"),
    [
        ([256.0, 257.0, 0.0], torch.bfloat16, 1),  # steps of 2 from 256 on: 257 goes to the even neighbour, 256
        ([256.0, 258.0, 0.0], torch.bfloat16, 0),
        ([256.0, 257.0, 0.0], torch.float16, 0),
        ([256.0, 257.0, 0.0], torch.float32, 0),
        ([0.0, 3.0, 3.0], torch.float32, 1),
        ([3.0, 3.0, 4.0], torch.float32, 0),  # only the maximum counts
        ([70000.0, 90000.0, 0.0], torch.float16, 1),  # both are infinite there
        ([-5.0, -5.0, -9.0], torch.bfloat16, 1),
    ],
)
def test_ties_are_those_of_the_models_number_type(row: list[float], dtype: torch.dtype, tied: int) -> None:
    assert of_scores(row, dtype=dtype)["tied_rows"] == tied


def test_ties_are_a_share_of_the_rows() -> None:
    assert of_scores([1.0, 1.0], [1.0, 2.0], [2.0, 2.0], [0.0, 3.0])["tied_rows"] == 0.5


def test_hidden_keys_tie_with_nothing() -> None:
    """Key 0 is as high as the largest visible logit, and hidden."""
    scores = torch.tensor([[4.0, 4.0, 1.0]]).expand(3, 3)[None, None]
    shown = torch.tensor([False, True, True])
    found = finish(measure(Attention(None, None, scores=scores, mask=shown), [0], [0, 1, 2]))
    assert found[NAMES.index("tied_rows")].item() == 0


def test_the_type_of_queries_decides_when_nothing_else_does() -> None:
    """Logits 256 and 257, each exact in float32."""
    q, k = torch.ones(1, 1, 1, 2), torch.tensor([[256.0, 0.0], [256.0, 1.0]])[None, None]
    for dtype, tied in ((torch.bfloat16, 1), (torch.float32, 0)):
        assert attention_statistics(q.to(dtype), k.to(dtype), scale=1.0)["tied_rows"].item() == tied


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_decides_in_a_model(autocast: bool) -> None:
    """The fused kernel casts float32 queries and keys: what it computes in is what ties. One logit of 257, all others
    256."""
    keys = torch.zeros(T, D)
    keys[:, 0], keys[3, 1] = 256, 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(0 * q + 1, 0 * k + keys, v, scale=1.0)

    model = Model(Mixer(parts(), call)).train()
    probe = Probe(model, rows=None)
    probe.arm(look=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.zeros(2, T, E)).float().sum().backward()
    assert values_of(probe.finish())["tied_rows"].tolist() == [float(autocast)] * H


# --- outlier_share ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k", "share"),
    [
        ([1.0, 2.0, 3.0, 4.0], [[1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]], 0.4),  # logits 10 and 4: 4 of 10
        ([1.0, 2.0, 3.0, 4.0], [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 9.0, 0.0]], 1.0),  # 27: one coordinate alone
        ([1.0, 1.0, 1.0, 1.0], [[2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]], 0.25),  # all alike: 1/d
        ([5.0, -3.0, 1.0, 1.0], [[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], 10 / 13),  # 10 - 3: sizes count
    ],
)
def test_outlier_share_by_hand(q: list[float], k: list[list[float]], share: float) -> None:
    assert of_pair([q], k)["outlier_share"] == pytest.approx(share, rel=1e-6)


def test_rows_without_a_product_do_not_count() -> None:
    """A query of zeros has no largest coordinate: the mean is that of the other row."""
    keys = [[1.0, 3.0], [0.0, 0.0]]
    assert of_pair([[0.0, 0.0], [1.0, 1.0]], keys)["outlier_share"] == pytest.approx(0.75, rel=1e-6)
    assert math.isnan(of_pair([[0.0, 0.0]], keys)["outlier_share"])


def test_queries_and_keys_that_are_not_known_have_no_outliers() -> None:
    assert math.isnan(of_scores([1.0, 2.0, 3.0])["outlier_share"])


# --- qk_clip_factor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top", "factor"), [(400.0, 0.25), (100.0, 1.0), (3.0, 1.0), (-7.0, 1.0), (125.0, 0.8)])
def test_clip_factor_by_hand(top: float, factor: float) -> None:
    """What brings the largest logit down to 100; nothing below that."""
    assert of_scores([top, top - 5.0, top - 1.0])["qk_clip_factor"] == pytest.approx(factor, rel=1e-6)


def test_the_strongest_clip_of_all_parts_counts() -> None:
    scores = torch.tensor([[[[200.0, 0.0]]], [[[400.0, 0.0]]], [[[1.0, 0.0]]]])
    pairs = [measure(Attention(None, None, scores=scores), [b], [0]) for b in (0, 1, 2)]
    merged = finish(merge(merge(pairs[0], pairs[1]), pairs[2]))
    assert merged[NAMES.index("qk_clip_factor")].item() == 0.25
    assert merged[NAMES.index("logit_max")].item() == 400
