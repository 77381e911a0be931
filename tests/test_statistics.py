"""The statistics of attention maps against worked values and a slow float64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests import reference
from tests.devices import Watch
from torch import Tensor

from attnwatch.hooks import maps, statistics
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.statistics import (
    ATTENTION,
    attention_statistics,
    finish,
    measure,
    merge,
    sample_rows,
)

NAMES = [s.name for s in ATTENTION]
INF = float("inf")


def call(seed: int) -> tuple[dict[str, Any], torch.Generator]:
    """A random attention call: arguments of `Attention`."""
    g = torch.Generator().manual_seed(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=g))]

    batch, kv_heads, group = one_of(1, 2, 3), one_of(1, 2, 3), one_of(1, 2, 4)
    heads, d = kv_heads * group, one_of(2, 5, 8)
    queries = one_of(1, 3, 8, 17)
    keys = one_of(queries, queries, 4, 13)
    dtype = one_of(torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    sharp = one_of(0.5, 1.0, 4.0)
    made: dict[str, Any] = {
        "q": (sharp * torch.randn(batch, heads, queries, d, generator=g)).to(dtype),
        "k": torch.randn(batch, kv_heads, keys, d, generator=g).to(dtype),
        "causal": one_of(False, True, True),
        "window": one_of(None, None, 1, 3),
        "scale": one_of(None, None, 0.3, torch.rand(heads, generator=g), torch.tensor(0.7)),
        "softcap": one_of(None, None, 2.0),
        "sinks": one_of(None, None, torch.randn(heads, generator=g)),
        "context": one_of(None, 7, 100),
    }
    shape = [batch, heads, queries, keys]
    for name, odds in (("mask", 4), ("bias", 2)):
        if one_of(*[True] * odds, False):
            dims = [one_of(1, n) for n in shape][one_of(0, 0, 1, 2) :]
            numbers = torch.randn(dims, generator=g)
            shown = torch.rand(dims, generator=g) < one_of(0.6, 0.9)
            hidden = one_of(-INF, torch.finfo(torch.float32).min)
            if name == "bias":
                made[name] = numbers
            else:
                made[name] = one_of(shown, torch.where(shown, numbers, hidden))
    if one_of(False, False, False, True):  # left padding
        padding = torch.arange(keys) >= torch.randint(keys, (batch, 1), generator=g)
        made["mask"] = padding[:, None, None, :]
    return made, g


def assert_close(found: dict[str, Tensor], expected: dict[str, list[float]]) -> None:
    for name in NAMES:
        torch.testing.assert_close(
            found[name].double(),
            torch.tensor(expected[name], dtype=torch.float64),
            rtol=1e-4,
            atol=1e-6,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def named(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return dict(zip(NAMES, finish(pair).unbind(), strict=True))


@pytest.mark.parametrize("seed", range(150))
def test_agrees_with_the_definitions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mix of grouping, masks, bias, soft-cap, sink, dtype and shape; blocks of every size."""
    made, _ = call(seed)
    monkeypatch.setattr(statistics, "BLOCK", (2**20, 2**10, 150, 40, 1)[seed % 5])
    assert_close(attention_statistics(**made), reference.attention_statistics(**made))


@pytest.mark.parametrize("seed", range(150, 190))
def test_agrees_on_some_rows_of_some_sequences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, g = call(seed)
    monkeypatch.setattr(statistics, "BLOCK", (2**20, 300, 60)[seed % 3])
    batch, queries = made["q"].shape[0], made["q"].shape[2]
    sequences = torch.randperm(batch, generator=g)[: max(1, batch - 1)].tolist()
    rows = sample_rows(queries, 5, 0.3)
    found = named(measure(Attention(**made), sequences, rows))
    assert_close(found, reference.attention_statistics(**made, sequences=sequences, rows=rows))


@pytest.mark.parametrize("seed", range(265, 275))
def test_long_sequences_give_evenly_spaced_rows_to_map_rank(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 4 rows instead of 1024: every second, third or fifth row, whatever the blocks."""
    made, _ = call(seed)
    monkeypatch.setattr(maps, "RANK_ROWS", 4)
    monkeypatch.setattr(reference, "RANK_ROWS", 4)
    monkeypatch.setattr(statistics, "BLOCK", (2**20, 70)[seed % 2])
    assert_close(attention_statistics(**made), reference.attention_statistics(**made))


@pytest.mark.parametrize("seed", range(190, 205))
def test_logits_of_hand_written_attention_give_the_same(seed: int) -> None:
    """Scores with everything already inside, hidden keys lowered by hand, are measured like the call they came from."""
    made, _ = call(seed)
    made.update(causal=True, sinks=None)
    asked = {name: value for name, value in made.items() if name not in ("sinks", "context")}
    logits, visible = reference.logits_and_visibility(**asked)
    scores = torch.tensor(logits, dtype=torch.float32)
    hidden = (-INF, -1e9, torch.finfo(torch.float32).min)[seed % 3]
    scores = torch.where(torch.tensor(visible), scores, hidden)
    attention = Attention(made["q"], made["k"], scores=scores, dtype=made["q"].dtype, context=made["context"])
    found = named(measure(attention, list(range(attention.batch)), list(range(attention.queries))))
    assert_close(found, reference.attention_statistics(**made))
    alone = named(measure(Attention(None, None, scores=scores), list(range(attention.batch)), [0]))
    assert alone["query_norm_max"].isnan().all()
    assert alone["key_norm_max"].isnan().all()
    assert alone["outlier_share"].isnan().all()


def logits_as_given(scores: Tensor, **call: Any) -> dict[str, float]:
    """Statistics of one sequence and head whose logits are `scores` `[T, T]`."""
    eye = torch.eye(scores.shape[1])[None, None]
    found = attention_statistics(scores[None, None], eye, scale=1.0, **call)
    return {name: float(value) for name, value in found.items()}


def test_uniform_attention() -> None:
    """All keys alike: entropy ln n, no spread, the whole gradient passes, one direction."""
    found = logits_as_given(torch.zeros(16, 16))
    assert found["entropy"] == pytest.approx(math.log(16), rel=1e-6)
    assert found["entropy_ratio"] == pytest.approx(1, rel=1e-6)
    assert found["logit_spread"] == 0
    assert found["spread_ratio"] == 0
    assert found["softmax_gradient"] == pytest.approx(1, rel=1e-6)
    assert found["map_rank"] == pytest.approx(1, rel=1e-4)
    assert found["sink_mass"] == pytest.approx(1 / 16, rel=1e-6)
    assert found["saturated_rows"] == 0


def test_identity_map() -> None:
    """Every row on its own key: no entropy, and nearly as many directions as rows."""
    found = logits_as_given(200 * torch.eye(128))
    assert found["entropy"] == pytest.approx(0, abs=1e-6)
    assert found["map_rank"] >= 126
    assert found["saturated_rows"] == 1
    assert found["softmax_gradient"] == pytest.approx(0, abs=1e-6)


def test_pure_sink() -> None:
    """Every row on key 0: no entropy, all mass on the sink, and nothing left beside it."""
    scores = torch.zeros(128, 128)
    scores[:, 0] = 200
    found = logits_as_given(scores)
    assert found["entropy"] == pytest.approx(0, abs=1e-6)
    assert found["sink_mass"] == pytest.approx(1, rel=1e-6)
    assert found["first_key_mass"] == pytest.approx(1, rel=1e-6)
    assert found["map_rank"] == 0


def test_previous_token_map() -> None:
    """Every row on the key before it: sharp, yet of many directions."""
    scores = 200 * torch.eye(128).roll(-1, 1)
    found = logits_as_given(scores)
    assert found["entropy"] == pytest.approx(0, abs=1e-6)
    assert found["map_rank"] >= 125


def test_two_keys_by_hand() -> None:
    """Logits 0 and ln 3, two keys: shares 1/4 and 3/4."""
    found = logits_as_given(torch.tensor([[0.0, math.log(3)]]).expand(2, 2))
    assert found["logit_max"] == pytest.approx(math.log(3), rel=1e-6)
    assert found["spread_ratio"] == pytest.approx(math.log(3) / math.log(99), rel=1e-6)
    assert found["entropy"] == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), rel=1e-6)
    assert found["softmax_gradient"] == pytest.approx((1 - 10 / 16) * 2, rel=1e-6)
    assert found["sink_mass"] == pytest.approx(0.75, rel=1e-6)
    assert found["first_key_mass"] == pytest.approx(0.25, rel=1e-6)


def test_learned_sink_by_hand() -> None:
    """Logits 0, 0 and a sink of ln 2: shares 1/4, 1/4 and 1/2; the sink's half is the largest mass."""
    found = logits_as_given(torch.zeros(2, 2), sinks=torch.tensor([math.log(2)]))
    assert found["entropy"] == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(2), rel=1e-6)
    assert found["entropy_ratio"] == pytest.approx(1.5 * math.log(2) / math.log(3), rel=1e-6)
    assert found["sink_mass"] == pytest.approx(0.5, rel=1e-6)
    assert found["softmax_gradient"] == pytest.approx((1 - 1 / 8) * 2, rel=1e-6)


def test_a_sink_far_above_the_logits_overflows_nothing() -> None:
    found = logits_as_given(torch.zeros(4, 4), sinks=torch.tensor([500.0]))
    assert found["sink_mass"] == 1
    assert found["entropy"] == 0
    assert found["map_rank"] == 0


@pytest.mark.parametrize("seed", range(205, 225))
def test_merge_of_parts_is_the_whole(seed: int) -> None:
    """Sequences measured in any parts, merged in any order, give what one measurement gives."""
    made, g = call(seed)
    made = {n: torch.cat([v, 2 * v]) if n in ("q", "k") else v for n, v in made.items()}
    made["mask"] = None
    made["bias"] = None
    attention = Attention(**made)
    order = torch.randperm(attention.batch, generator=g).tolist()
    rows = list(range(attention.queries))
    parts = [measure(attention, [b], rows) for b in order]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(part, merged)
    whole = measure(attention, order, rows)
    torch.testing.assert_close(finish(merged), finish(whole), equal_nan=True, rtol=1e-5, atol=1e-7)


def test_rows_that_see_nothing_count_nowhere() -> None:
    """Left padding as torch wants it, with rows of padding that see no key: same values as without the padding."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 4, 12, 8, generator=g)
    shown = (torch.arange(12) >= 4).expand(12, 12).tril()[None, None]
    padded = attention_statistics(q[None, 0], k[None, 0], mask=shown, context=50)
    bare = attention_statistics(q[None, 0, :, 4:], k[None, 0, :, 4:], causal=True, context=50)
    for name in NAMES:
        torch.testing.assert_close(padded[name], bare[name], rtol=1e-5, atol=1e-6, msg=name)


def test_nothing_visible_is_nan_not_zero() -> None:
    q = torch.ones(2, 3, 5, 4)
    found = attention_statistics(q, q, mask=torch.zeros(5, 5, dtype=torch.bool), context=50)
    for name in NAMES:
        assert (found[name] == 0).all() if name == "nonfinite" else found[name].isnan().all(), name


def test_one_key_tells_nothing_of_a_row() -> None:
    """A single key: no average has a value, the largest logit and norms have."""
    q = torch.ones(1, 1, 5, 4)
    found = attention_statistics(q, q[:, :, :1])
    assert found["logit_max"].item() == 2
    assert found["key_norm_max"].item() == 2
    assert all(found[s.name].isnan().all() for s in ATTENTION if s.merge == "mean")


@pytest.mark.parametrize("poison", [math.nan, INF])
@pytest.mark.parametrize("block", [2**20, 30])
def test_bad_logits_are_counted_and_left_out(poison: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One poisoned row and one poisoned hidden key: the means are those of the other rows; NaN and +inf are counted."""
    monkeypatch.setattr(statistics, "BLOCK", block)
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(1, 2, 6, 6, generator=g)
    shown = torch.ones(6, 6, dtype=torch.bool)
    shown[:, 5] = False
    scores[0, 0, 3, 2] = poison
    scores[0, :, :, 5] = math.nan
    q, k = torch.randn(2, 1, 2, 6, 6, generator=g)
    bad = named(measure(Attention(q, k, mask=shown, scores=scores, context=50), [0], [0, 1, 2, 3, 4, 5]))
    good = reference.attention_statistics(
        q, k, mask=shown, scores=scores.nan_to_num(0, 0, 0), context=50, rows=[0, 1, 2, 4, 5]
    )
    for name in (s.name for s in ATTENTION if s.merge == "mean"):
        assert bad[name][0].item() == pytest.approx(good[name][0], rel=1e-4), name
    assert bad["nonfinite"].tolist() == [1, 0]
    assert bad["logit_max"][0] == (INF if poison == INF else scores[0, 0, :, :5].nan_to_num(-INF).max())
    assert bad["logit_max"][1] == scores[0, 1, :, :5].max()


def test_a_logit_of_minus_infinity_leaves_its_row_out() -> None:
    """An overflowed product is no hidden key: its row has no spread to average, and it is not NaN or +inf."""
    q = torch.tensor([1.0, 2.0, 1e30])[None, None, :, None]
    k = torch.tensor([1.0, 3.0, -1e30])[None, None, :, None]
    shown = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1]]).bool()
    found = attention_statistics(q, k, scale=1.0, mask=shown)
    assert found["logit_spread"].item() == pytest.approx((2 + 4) / 2)
    assert found["logit_max"].item() == pytest.approx(3e30)
    assert found["nonfinite"].item() == 0


def test_infinite_weights_do_not_raise() -> None:
    """A diverged model: every logit is NaN. Only the count has a value."""
    q = torch.full((1, 2, 4, 4), math.nan)
    found = attention_statistics(q, q, causal=True)
    assert found["nonfinite"].tolist() == [10, 10]
    assert all(found[name].isnan().all() for name in NAMES if name != "nonfinite")


@pytest.mark.parametrize("seed", range(225, 245))
def test_norms_bound_the_largest_logit(seed: int) -> None:
    made, _ = call(seed)
    made.update(bias=None, scale=0.4, softcap=None)
    if made.get("mask") is not None and made["mask"].is_floating_point():
        made["mask"] = None
    found = attention_statistics(**made)
    bound = 0.4 * found["query_norm_max"] * found["key_norm_max"]
    known = ~bound.isnan()
    assert (found["logit_max"][known] <= bound[known] * (1 + 1e-5)).all()


@pytest.mark.parametrize("seed", range(245, 265))
def test_never_waits_for_the_device_nor_draws_random_numbers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = call(seed)
    monkeypatch.setattr(statistics, "BLOCK", (2**20, 100)[seed % 2])
    attention = Attention(**made)
    sequences, rows = torch.arange(attention.batch), torch.arange(attention.queries)
    state = torch.get_rng_state()
    later = maps.Later(2**30)
    with Watch():
        pair = measure(attention, sequences, rows, later)
        finish(merge(pair, pair))
    statistics.add_ranks([(pair, later.grams)])
    torch.testing.assert_close(finish(pair), finish(measure(attention, sequences, rows)), equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_finds_no_room_is_ranked_at_once() -> None:
    """Of two sequences in blocks of one, the first one's maps wait (8 x 8 float32 each), the second one's do not."""
    q, k = torch.randn(2, 2, 3, 8, 4, generator=torch.Generator().manual_seed(5))
    attention, rows = Attention(q, k), list(range(8))
    later = maps.Later(3 * 8 * 8 * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "BLOCK", 3 * 8 * 8)
        pair = measure(attention, [0, 1], rows, later)
    assert later.room == 0
    assert [gram.matrices.shape for gram in later.grams] == [(1, 3, 8, 8)]
    alone = measure(attention, [1], rows)
    torch.testing.assert_close(pair[0][statistics.MAP_RANK], alone[0][statistics.MAP_RANK])
    statistics.add_ranks([(pair, later.grams)])
    torch.testing.assert_close(finish(pair), finish(measure(attention, [0, 1], rows)), equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
def test_all_rows_never_hold_a_whole_map(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a long sequence, in blocks: nothing as large as one head's map; only rank rows pass a block."""
    monkeypatch.setattr(statistics, "BLOCK", 2**16)
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 4, 2560, 8, generator=g)
    mask = torch.ones(1, 1, 2560, 2560, dtype=torch.bool).tril() if masked else None
    with Watch(syncs=()) as watch:
        measure(Attention(q[None, 0], k[None, 0], causal=not masked, mask=mask), [0], range(2560))
    assert watch.largest <= 1024 * 2560
    assert watch.largest < 2560 * 2560 / 2


def test_works_inside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that require grad, autocast on: float32 numbers, no graph, inputs untouched."""
    g = torch.Generator().manual_seed(4)
    q = torch.randn(1, 2, 8, 4, generator=g).requires_grad_()
    k, scale = torch.randn(1, 2, 8, 4, generator=g), torch.ones(2, requires_grad=True)
    before = q.detach().clone()
    plain = attention_statistics(q, k, scale=scale, context=50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_statistics(q, k, scale=scale, context=50)
    assert q.detach().equal(before)
    for name in NAMES:
        assert found[name].dtype == torch.float32
        assert not found[name].requires_grad
        assert found[name].equal(plain[name]), name


def test_wrong_use_says_what_to_do_in_one_line() -> None:
    q = torch.ones(1, 4, 5, 8)
    for wrong, words in (
        ({"k": torch.ones(1, 3, 5, 8)}, "multiple of Hk"),
        ({"mask": torch.ones(7, dtype=torch.bool)}, "mask to broadcast"),
        ({"mask": torch.ones(5, 5, dtype=torch.int64)}, "cast it"),
        ({"rows": 0}, "rows of at least 1"),
        ({"context": 1}, "context of at least 2 keys"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            attention_statistics(**{"q": q, "k": q, **wrong})
        assert "\n" not in str(raised.value)


def test_what_a_score_mod_returns_is_not_written_on() -> None:
    """It may hand out a tensor of its own, or one number for all."""
    own = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    kept = own.clone()
    q, k = torch.randn(2, 1, 2, 5, 4, generator=torch.Generator().manual_seed(2))
    for returned in (own, torch.zeros(()).expand(1, 2, 5, 5)):
        pair = measure(Attention(q, k, score_mod=lambda score, *at, it=returned: it), [0], range(5))
        expected = measure(Attention(None, None, scores=returned.clone()), [0], range(5))
        torch.testing.assert_close(finish(pair)[:10], finish(expected)[:10], equal_nan=True)
    assert torch.equal(own, kept)
