"""Small calls of several layers are measured as one, to the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import step, tokens, values_of
from tests.test_probe import Stack
from torch import Tensor

from attnwatch.hooks import statistics, together
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe
from attnwatch.hooks.statistics import finish, measure
from attnwatch.hooks.together import Share, Together, rank


def call(seed: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, **how: Any) -> Attention:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(3, n, 12, 8, generator=g).to(dtype) * (1 + seed) for n in (heads, kv_heads))
    return Attention(q, k, **how)


def found(shares: list[Share]) -> list[Tensor]:
    rank(list({id(share.batch): share.batch for share in shares}.values()))
    return [finish(share.pair) for share in shares]


@pytest.mark.parametrize("block", [2**20, 3 * 2 * 4 * 12 * 8, 1], ids=["one batch", "three and two", "each by itself"])
@pytest.mark.parametrize(
    "how",
    [{"causal": True}, {"causal": True, "window": 3}, {"scale": 0.3, "softcap": 5.0, "context": 99}, {"kv_heads": 4}],
    ids=str,
)
def test_calls_measured_as_one_are_as_measured_alone(
    block: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five layers of logits ever wider; the model overwrites its queries and keys right after each call."""
    calls = [call(seed, **how) for seed in range(5)]
    sequences, rows = [0, 2], [1, 4, 7, 11]
    alone = [finish(measure(each, sequences, rows)) for each in calls]
    monkeypatch.setattr(statistics, "BLOCK", block)
    all_of_them = Together(2**20)
    shares = []
    for each in calls:
        shares.append(all_of_them.add(each, sequences, rows))
        assert each.q is not None
        assert each.k is not None
        each.q.zero_(), each.k.zero_()
    all_of_them.finish()
    count = {2**20: 1, 1: 5}.get(block, 2)
    assert len({id(share.batch) for share in shares}) == count
    for values, expected in zip(found(shares), alone, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_calls_that_differ_are_not_mixed() -> None:
    """In shape, type, mask or scale, or in which of their rows count: each is measured as what it is."""
    square = torch.ones(12, 12, dtype=torch.bool).tril()
    calls = [
        call(1), call(2, heads=2), call(1, kv_heads=1), call(1, dtype=torch.bfloat16), call(1, causal=True),
        call(1, scale=0.1), call(1, mask=square), call(1, bias=torch.randn(4, 12, 12)), call(1, sinks=torch.zeros(4)),
        call(1, scale=torch.tensor([0.1, 0.2, 0.3, 0.4])), call(1, window=2), call(1, softcap=3.0),
        replace(call(1), dtype=torch.bfloat16), call(1, context=7),
    ]  # fmt: skip
    some = Together(2**20)
    shares = [some.add(each, [0, 1], [3, 11]) for each in calls]
    some.finish()
    assert len({id(share.batch) for share in shares}) == len(calls)
    for values, each in zip(found(shares), calls, strict=True):
        expected = finish(measure(each, [0, 1], [3, 11]))
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_layer_of_nan_leaves_the_others_of_its_batch_as_they_are() -> None:
    calls = [call(seed, causal=True) for seed in range(3)]
    assert calls[1].q is not None
    calls[1].q[:, 2] = torch.nan
    some = Together(2**20)
    shares = [some.add(each, [0, 1, 2], [5, 11]) for each in calls]
    some.finish()
    first, bad, last = found(shares)
    for values, each in ((first, calls[0]), (last, calls[2]), (bad, calls[1])):
        expected = finish(measure(each, [0, 1, 2], [5, 11]))
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    nonfinite = [metric.name for metric in statistics.ATTENTION].index("nonfinite")
    assert first[nonfinite].sum() == last[nonfinite].sum() == 0
    assert bad[nonfinite].tolist() == [0, 0, 3 * (6 + 12), 0]  # visible logits of rows 5 and 11


def test_a_batch_that_cannot_be_measured_is_named_by_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step's end, where nothing may be raised either."""
    model = Stack().train()
    probe = Probe(model)
    whole = step(probe, model, tokens())

    def breaks(*args: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(together, "measure", breaks)
        reading = step(probe, model, tokens())
    assert [where for where, _ in reading.problems] == ["first", "second"]
    assert all(text.endswith("MemoryError: no more") for _, text in reading.problems)
    assert np.isnan(reading.values).all()
    again = step(probe, model, tokens())
    assert again.problems == ()
    assert {layer.state for layer in again.layers} == {"verified"}
    names = [metric.name for metric in METRICS]
    np.testing.assert_allclose(
        again.values[names.index("key_norm_max")], whole.values[names.index("key_norm_max")], rtol=1e-6
    )
    assert np.isfinite(values_of(again, "second")["map_rank"]).all()
