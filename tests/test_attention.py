"""Logits and visibility of parts of an attention call against the whole, made at once by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import reference
from torch import Tensor

from attnwatch.hooks.attention import Attention, check

B, H, HK, TQ, TK, D = 3, 6, 2, 7, 9, 4
GENERATOR = torch.Generator().manual_seed(0)
Q = torch.randn(B, H, TQ, D, generator=GENERATOR)
K = torch.randn(B, HK, TK, D, generator=GENERATOR)
RIGHT = torch.rand(B, H, TQ, TK, generator=GENERATOR) < 0.7
PADDING = torch.arange(TK) >= torch.tensor([0, 3, 8])[:, None]
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "square": RIGHT[0, 0],
    "of sequence": RIGHT[:, :1],
    "of head": RIGHT[0],
    "of everything": RIGHT,
    "of row": RIGHT[:, :, :, :1],
    "padding": PADDING[:, None, None, :],
    "padding of head": RIGHT[:, :, :1],
    "one for all": PADDING[1],
    "float": torch.where(RIGHT[:, :1], 0.5, -torch.inf),
    "float padding": torch.where(PADDING, 0.0, torch.finfo(torch.float16).min)[:, None, None].half(),
}
MASKING = pytest.mark.parametrize("name", list(MASKS))
REACH = pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 2), (True, 2), (True, 1)])


@MASKING
@REACH
@pytest.mark.parametrize("heads", [slice(0, 6), slice(3, 6), slice(1, 3), slice(5, 6)])
def test_a_part_is_that_part_of_the_whole(name: str, causal: bool, window: int | None, heads: slice) -> None:
    """Logits and visibility of some sequences, heads and rows; heads within a group or whole groups."""
    call: dict[str, Any] = {"causal": causal, "window": window, "mask": MASKS[name]}
    logits, visible = (torch.tensor(x) for x in reference.logits_and_visibility(Q, K, **call))
    attention = Attention(Q, K, **call)
    sequences, rows = torch.tensor([2, 0]), torch.tensor([1, 2, 6])
    part = (sequences[:, None, None], torch.arange(H)[heads][None, :, None], rows)
    queries, keys = attention.query_block(sequences, heads, rows), attention.key_block(sequences, heads)
    found = attention.logits(queries, keys, sequences, heads, rows)
    seen = attention.visible(sequences, heads, rows)
    assert found.dtype == torch.float32
    if seen is None:
        assert visible.all()
    else:
        assert seen.expand_as(visible[part]).equal(visible[part])
        assert seen.shape[0] in (1, 2)
    torch.testing.assert_close(found[visible[part]].double(), logits[part][visible[part]], rtol=1e-5, atol=1e-5)


@MASKING
@REACH
@pytest.mark.parametrize("elements", [1, 200, 2**20])
def test_counts_over_all_rows(name: str, causal: bool, window: int | None, elements: int) -> None:
    """Keys a row sees and the first key of a sequence, by closed form or by chunks of any size."""
    call: dict[str, Any] = {"causal": causal, "window": window, "mask": MASKS[name]}
    _, visible = reference.logits_and_visibility(Q, K, **call)
    sequences = torch.tensor([2, 0])
    counts, first = Attention(Q, K, **call).counts(sequences, elements)
    seen = torch.tensor(visible)[sequences]
    assert counts.expand(2, H, TQ).equal(seen.sum(-1))
    somewhere = seen.any(-1).any(-1)
    assert first.expand(2, H)[somewhere].equal(seen.any(-2).long().argmax(-1)[somewhere])


@settings(max_examples=40, derandomize=True, deadline=None)
@given(queries=st.integers(1, 9), keys=st.integers(1, 9), window=st.none() | st.integers(1, 12), causal=st.booleans())
def test_counts_without_mask_hold_for_any_shape(queries: int, keys: int, window: int | None, causal: bool) -> None:
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    seen = (~torch.tensor(causal) | (j <= i)) & (j > i - (window or 99))
    attention = Attention(torch.ones(2, 1, queries, 1), torch.ones(2, 1, keys, 1), causal=causal, window=window)
    counts, first = attention.counts(torch.arange(2), 10)
    assert counts.shape == (2, 1, queries)
    assert counts[0, 0].equal(seen.sum(-1))
    assert first.eq(0).all()


def test_mask_and_bias_hide_together() -> None:
    """A position bias may carry the causal mask, and a padding mask come beside it."""
    bias = torch.zeros(1, H, TQ, TK).masked_fill(~RIGHT[:1], torch.finfo(torch.float32).min)
    attention = Attention(Q, K, mask=PADDING[:, None, None, :], bias=bias)
    seen = attention.visible(torch.arange(B), slice(0, H), torch.arange(TQ))
    assert seen is not None
    assert seen.equal(RIGHT[:1] & PADDING[:, None, None, :])


def test_scale_soft_cap_and_bias_in_their_order() -> None:
    """2 * 3 * 0.5 = 3, capped at 2: 2 tanh(1.5), then 10 is added."""
    one = torch.ones(1, 1, 1, 1)
    attention = Attention(2 * one, 3 * one, scale=0.5, softcap=2.0, bias=10 * one)
    at = torch.tensor([0])
    head = slice(0, 1)
    found = attention.logits(attention.query_block(at, head, at), attention.key_block(at, head), at, head, at)
    assert found.item() == pytest.approx(2 * 0.9051482536448664 + 10)


def test_half_precision_scores_hide_by_their_own_minimum() -> None:
    scores = torch.tensor([1.0, -40000.0, -30000.0, -torch.inf, torch.nan]).half()[None, None, None]
    seen = Attention(None, None, scores=scores).visible(torch.tensor([0]), slice(0, 1), torch.tensor([0]))
    assert seen is not None
    assert seen.flatten().tolist() == [True, False, True, False, True]


def test_shapes_of_scores_alone() -> None:
    attention = Attention(None, None, scores=torch.zeros(2, 3, 4, 5))
    check(attention)
    assert [attention.batch, attention.heads, attention.kv_heads, attention.queries, attention.keys] == [2, 3, 3, 4, 5]
    assert attention.head_dim == 0
    assert attention.query_block(torch.tensor([0]), slice(0, 3), torch.tensor([0])) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"q": None}, "found neither"),
        ({"q": Q[0]}, "q of 4 dimensions"),
        ({"q": Q.long()}, "float dtype"),
        ({"k": K.mT}, "transposed"),
        ({"k": K[:2]}, "multiple of Hk"),
        ({"k": K[:, :, :0]}, "at least one"),
        ({"mask": RIGHT[:2]}, "mask to broadcast"),
        ({"mask": RIGHT[None]}, "mask to broadcast"),
        ({"mask": RIGHT.int()}, "float mask"),
        ({"bias": RIGHT}, "float bias"),
        ({"scale": torch.ones(5)}, "scale of one value a head"),
        ({"sinks": torch.ones(HK)}, "sinks of one value a head"),
        ({"window": 0}, "window of at least 1"),
        ({"softcap": 0.0}, "softcap above 0"),
        ({"scores": torch.zeros(B, H, TQ + 1, TK)}, "as scores"),
    ],
)
def test_wrong_shapes_say_what_was_expected(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        check(Attention(**{"q": Q, "k": K, **wrong}))
    assert "\n" not in str(raised.value)
    assert "found" in str(raised.value)
