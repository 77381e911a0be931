"""The samples of several ranks as one: worked values, and any split of the same measurements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnwatch.hooks.layers import METRICS, Layer
from attnwatch.hooks.packing import Layout, Packed, Unpacked, held, lay_out, pack, unpack
from attnwatch.hooks.probe import Reading
from attnwatch.hooks.statistics import ATTENTION, finish, merge

NAMES = [metric.name for metric in METRICS]
Numbers = NDArray[np.float64]


def reading(layers: Sequence[Layer], pairs: Numbers, last: dict[str, float] | None = None) -> Reading:
    """pairs: `[2, A, L, H]`. last: numbers of the weights, the same for every head."""
    values = np.full((len(METRICS), *pairs.shape[2:]), np.nan, np.float32)
    for name, value in (last or {}).items():
        values[NAMES.index(name)] = value
    names = tuple(layer.name for layer in layers)
    return Reading(names, tuple(layers), values, pairs, np.zeros(0), (), 0.0)


def layer(name: str = "a", heads: int = 1, state: str = "verified", **more: object) -> Layer:
    return Layer(name, heads=heads, kv_heads=heads, state=state, **more)  # type: ignore[arg-type]


def measured(**numbers: tuple[float, float]) -> Numbers:
    """`[2, A, 1, 1]` of one head: value and weight of each statistic that is named."""
    pairs = np.zeros((2, len(ATTENTION), 1, 1))
    for name, pair in numbers.items():
        pairs[:, NAMES.index(name), 0, 0] = pair
    return pairs


def together(
    readings: Sequence[Reading],
    scalars: Sequence[dict[str, float]] | None = None,
    notes: Sequence[dict[str, str]] | None = None,
) -> tuple[Layout, Unpacked]:
    passed = scalars or [{} for _ in readings]
    layout = lay_out([held(r, s) for r, s in zip(readings, passed, strict=True)], notes or [{} for _ in readings])
    shares = [pack(layout, r, s, [at]) for at, (r, s) in enumerate(zip(readings, passed, strict=True))]
    total = Packed(np.sum([share.sums for share in shares], 0), reduce(np.maximum, [share.tops for share in shares]))
    return layout, unpack(layout, total)


def test_each_kind_of_merge() -> None:
    """Two rows of entropy 1 and six of entropy 3 are eight of entropy 2.5."""
    one = measured(entropy=(2, 2), logit_max=(5, 1), qk_clip_factor=(0.5, 1), nonfinite=(1, 1))
    two = measured(entropy=(18, 6), logit_max=(7, 1), qk_clip_factor=(0.25, 1), nonfinite=(2, 1))
    _, known = together(
        [reading([layer()], one, {"qk_rank": 6.0}), reading([layer()], two, {"qk_rank": 6.0})],
        [{"loss": 2.0, "lr": 0.5}, {"loss": 4.0}],
    )
    found = {name: float(known.values[NAMES.index(name), 0, 0]) for name in NAMES}
    expected = {"entropy": 2.5, "logit_max": 7.0, "qk_clip_factor": 0.25, "nonfinite": 3.0, "qk_rank": 6.0}
    assert {name: value for name, value in found.items() if value == value} == expected
    assert known.scalars == {"loss": 3.0, "lr": 0.5}
    assert known.signals == [1.0]
    assert known.torn == ()


def test_infinite_logits_and_scalars_stay_what_they_are() -> None:
    one = reading([layer()], measured(logit_max=(np.inf, 1), query_norm_max=(0, 0)))
    _, known = together([one, reading([layer()], measured(logit_max=(3, 1)))], [{"loss": np.nan}, {"loss": 1.0}])
    assert known.values[NAMES.index("logit_max"), 0, 0] == np.inf
    assert np.isnan(known.values[NAMES.index("query_norm_max"), 0, 0])
    assert np.isnan(known.scalars["loss"])


def test_heads_that_are_split_stand_where_they_belong() -> None:
    """Rank 1 holds the last two of four heads."""
    ranks = []
    for rank in range(2):
        pairs = np.zeros((2, len(ATTENTION), 1, 2))
        pairs[:, NAMES.index("logit_max"), 0] = [[10 * rank + 1, 10 * rank + 2], [1, 1]]
        ranks.append(reading([layer(heads=2, part=(rank, 2))], pairs))
    layout, known = together(ranks)
    assert known.values[NAMES.index("logit_max"), 0].tolist() == [1, 2, 11, 12]
    (whole,) = layout.layers
    assert (whole.heads, whole.kv_heads, whole.part) == (4, 4, (0, 1))


def test_layers_that_are_split_stand_in_the_order_of_ranks() -> None:
    """Of unequal width; a rank that looks at a layer of another and sees no call in it does not hide it."""
    unseen = layer("b", heads=0, state="uncovered")
    first = reading([layer("a", heads=1)], measured(logit_max=(1, 1)))._replace(layers=(layer("a", heads=1), unseen))
    pairs = np.zeros((2, len(ATTENTION), 1, 3))
    pairs[:, NAMES.index("logit_max"), 0] = [[2, 3, 4], [1, 1, 1]]
    layout, known = together([first, reading([layer("b", heads=3)], pairs)])
    assert layout.measured == ("a", "b")
    assert [each.state for each in layout.layers] == ["verified", "verified"]
    np.testing.assert_array_equal(known.values[NAMES.index("logit_max")], [[1, np.nan, np.nan], [2, 3, 4]])


def test_a_layer_is_seen_as_surely_as_by_the_rank_that_sees_it_worst() -> None:
    seen, unseen = reading([layer()], measured(entropy=(2, 2))), reading([layer(state="uncovered")], measured())
    layout, known = together([seen, unseen], notes=[{"a": "fine"}, {"a": "no row sees any key"}])
    assert [(each.state, each.note) for each in layout.layers] == [("uncovered", "rank 1: no row sees any key")]
    assert np.isnan(known.values).all()


@pytest.mark.parametrize(("other", "torn"), [(3.0, ()), (3.001, ()), (3.1, ("a",))])
def test_weights_that_differ_under_one_name_are_told(other: float, torn: tuple[str, ...]) -> None:
    ranks = [reading([layer()], measured(), {"wq_sigma_max": value}) for value in (3.0, other)]
    assert together(ranks)[1].torn == torn


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_any_split_merges_as_micro_batches_do(ranks: int, layers: int, heads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (ranks, len(ATTENTION), layers, heads)
    weights = random.integers(0, 4, shape).astype(float)
    kinds = np.array([metric.merge for metric in ATTENTION])
    weights[:, kinds != "mean"] = weights[:, kinds != "mean"] > 0
    values = np.where(weights > 0, random.normal(size=shape), 0.0)
    values[:, kinds == "max"] = np.where(weights > 0, values, -np.inf)[:, kinds == "max"]
    values[:, kinds == "min"] = np.where(weights > 0, values, np.inf)[:, kinds == "min"]
    names = [layer(f"layer {n}", heads) for n in range(layers)]
    readings = [reading(names, np.stack(each)) for each in zip(values, weights, strict=True)]

    pairs = [tuple(torch.from_numpy(x).flatten(1) for x in each) for each in zip(values, weights, strict=True)]
    expected = finish(reduce(merge, pairs)).numpy().reshape(shape[1:]).astype(np.float32)  # type: ignore[arg-type]
    found = together(readings)[1].values[: len(ATTENTION)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    exact = np.isin(kinds, ("max", "min"))
    np.testing.assert_array_equal(found[exact], expected[exact])
