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
from attnwatch.hooks.packing import (
    Layout,
    Packed,
    Unpacked,
    held,
    joined,
    lay_out,
    merged,
    of_weights,
    pack,
    sliced,
    unpack,
)
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
    return layout, unpack(layout, exchanged(shares))


def exchanged(shares: Sequence[Packed]) -> Packed:
    """As the ranks do it: each merges one slice of all shares."""
    rows, (adding, *_) = zip(*(sliced(share, len(shares)) for share in shares), strict=True)
    slices = [merged(np.stack(of_all), adding) for of_all in zip(*rows, strict=True)]
    return joined(np.stack(slices), adding, shares[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_slices_that_are_merged_apart_are_the_whole_merged(ranks: int) -> None:
    """Also where their sizes, 5 and 4, do not divide by the number of ranks, and where nothing is known of weights."""
    shares = [Packed(np.arange(5.0) + rank, np.array([rank, -rank]), np.array([-np.inf, 7])) for rank in range(ranks)]
    total = exchanged(shares)
    assert total.sums.tolist() == [ranks * n + ranks * (ranks - 1) / 2 for n in range(5)]
    assert total.tops.tolist() == [ranks - 1, 0]
    assert total.last.tolist() == [-np.inf, 7]
    narrow = exchanged([share._replace(last=share.last[:0]) for share in shares])
    assert [each.tolist() for each in narrow] == [total.sums.tolist(), total.tops.tolist(), []]


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


@pytest.mark.parametrize(("kv_parts", "kv_heads"), [(0, 4), (1, 2), (2, 4)])
def test_key_heads_that_every_rank_has_are_counted_once(kv_parts: int, kv_heads: int) -> None:
    """Two of four heads each, on two key heads; while nothing is known of these they count as split too."""
    pairs = np.zeros((2, len(ATTENTION), 1, 2))
    ranks = [reading([layer(heads=2, part=(rank, 2), kv_parts=kv_parts)], pairs) for rank in range(2)]
    (whole,) = together(ranks)[0].layers
    assert (whole.heads, whole.kv_heads) == (4, kv_heads)


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


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ((["0.blocks.0", "1.blocks.10"], ["0.blocks.1", "1.blocks.2"]), [0, 1, 2, 10]),
        ((["encoder.0", "encoder.1"], ["decoder.0", "decoder.1"]), [0, 1, 0, 1]),
        ((["blocks.1", "blocks.0"], ["blocks.1", "blocks.0"]), [1, 0]),
    ],
)
def test_layers_that_were_dealt_out_stand_in_their_order(ranks: tuple[list[str], ...], order: list[int]) -> None:
    """By their numbers, but encoders before decoders if the first rank has those; as they come where all hold all."""
    readings = [reading([layer(name) for name in names], np.zeros((2, len(ATTENTION), 2, 1))) for names in ranks]
    assert [int(name.split(".")[-1]) for name in together(readings)[0].measured] == order


def test_nothing_measured_on_any_rank_is_an_empty_sample() -> None:
    _, known = together([reading([], np.zeros((2, len(ATTENTION), 0, 0)))] * 2, [{"loss": 1.0}, {"loss": 3.0}])
    assert known.values.shape == (len(METRICS), 0, 0)
    assert (known.scalars, known.signals) == ({"loss": 2.0}, [1.0])


def test_a_layer_is_seen_as_surely_as_by_the_rank_that_sees_it_worst() -> None:
    seen, unseen = reading([layer()], measured(entropy=(2, 2))), reading([layer(state="uncovered")], measured())
    layout, known = together([seen, unseen], notes=[{"a": "fine"}, {"a": "no row sees any key"}])
    assert [(each.state, each.note) for each in layout.layers] == [("uncovered", "rank 1: no row sees any key")]
    assert np.isnan(known.values).all()


def test_what_no_rank_says_of_weights_need_not_be_sent() -> None:
    readings = [reading([layer()], measured(entropy=(2, 2))) for _ in range(2)]
    layout = lay_out([held(each, []) for each in readings], [{}, {}])
    wide = exchanged([pack(layout, each, {}, [0.0]) for each in readings])
    narrow = unpack(layout, wide._replace(last=wide.last[:0]))
    assert not of_weights(readings[0])
    assert of_weights(reading([layer()], measured(), {"qk_rank": 6.0}))
    np.testing.assert_array_equal(narrow.values, unpack(layout, wide).values)
    assert narrow.torn == ()


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
