"""flash-attn called by a user's own code, through stand-ins of its two operators: the kernel shows nothing but its
arguments, and they tell everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.families import watched
from tests import zoo, zoo_own
from tests.flash import flash_attn_func, flash_attn_varlen_func
from tests.models import layer_of, values_of
from tests.reference import attention_statistics
from torch import Tensor, nn

B, T, H, D = 2, 12, 4, 8
ENDS = torch.tensor([0, 5, 9, 12, 24], dtype=torch.int32)
"""Where the sequences end into which 24 tokens are packed: of 5, 4, 3 and 12."""

COMPARED = ("entropy", "entropy_ratio", "sink_mass", "first_key_mass", "logit_max", "logit_spread")


class Attention(nn.Module):
    """Two key heads for four query heads; keys may come from elsewhere."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, n) for n in (32, 16, 16, 32))
        self.call = call

    def heads(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[..., T, heads, D]`."""
        return tuple(w(y).unflatten(-1, (-1, D)) for w, y in ((self.wq, x), (self.wk, memory), (self.wv, memory)))  # type: ignore[return-value]

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        out: Tensor = self.wo(self.call(*self.heads(x, x if memory is None else memory)).flatten(-2))
        return out


def check(call: Callable[..., Tensor], *inputs: Tensor, packed: bool = False, **expected: Any) -> str:
    """The numbers are those of a slow reference with the arguments `expected`; returns the layer's note."""
    model = zoo_own.made(Attention(call))
    reading = watched(model, *inputs)
    with torch.no_grad():
        q, k, _ = model.attention.heads(inputs[0], inputs[-1])  # type: ignore[operator]
    q, k = (x[None] if packed else x for x in (q, k))
    layer = layer_of(reading, "attention")
    assert layer.state == "verified", layer.note
    assert (layer.heads, layer.kv_heads, layer.head_dim) == (H, 2, D)
    reference = attention_statistics(q.transpose(1, 2), k.transpose(1, 2), **expected)
    for metric in COMPARED:
        found = values_of(reading, "attention")[metric]
        np.testing.assert_allclose(found, reference[metric], rtol=1e-5, atol=1e-5, err_msg=metric)
    return layer.note


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"causal": True, "window_size": (3, -1)}, {"causal": True, "window": 4}),
        ({"causal": True, "window_size": (3, 3), "softcap": 2.0}, {"causal": True, "window": 4, "softcap": 2.0}),
        ({"softmax_scale": 0.7}, {"scale": 0.7}),
    ],
)
def test_the_arguments_of_the_call_tell_all(options: dict[str, Any], expected: dict[str, Any]) -> None:
    note = check(lambda q, k, v: flash_attn_func(q, k, v, **options), zoo_own.tokens(), **expected)
    assert "output made again" in note


def distance(queries: int, keys: int) -> Tensor:
    """How far a key lies behind a row, where the last row stands at the last key."""
    return torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)


def test_a_window_to_both_sides() -> None:
    behind = distance(T, T)
    mask = (behind <= 2) & (behind >= -1)
    check(lambda q, k, v: flash_attn_func(q, k, v, window_size=(2, 1)), zoo_own.tokens(), mask=mask)


def test_fewer_queries_than_keys_end_with_the_last_key() -> None:
    x, memory = zoo_own.tokens(7, seed=6), zoo_own.tokens()
    behind = distance(7, T)
    check(lambda q, k, v: flash_attn_func(q, k, v, causal=True), x, memory, mask=behind >= 0)
    windowed = (behind >= 0) & (behind <= 3)
    check(lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(3, 0)), x, memory, mask=windowed)


def test_slopes_of_linear_biases() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    bias = -slopes[:, None, None] * distance(T, T).abs()
    call = lambda q, k, v: flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)  # noqa: E731
    check(call, zoo_own.tokens(), causal=True, bias=bias[None])


@pytest.mark.parametrize("window", [None, 2])
def test_packed_sequences(window: int | None) -> None:
    """Told apart by where they end, and the layer says so."""
    document = torch.bucketize(torch.arange(2 * T), ENDS, right=True)
    behind = distance(2 * T, 2 * T)
    mask = (document[:, None] == document) & (behind >= 0)
    if window is not None:
        mask &= behind < window
    size = (-1, -1) if window is None else (window - 1, 0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, ENDS, ENDS, 12, 12, causal=True, window_size=size)

    note = check(call, zoo_own.tokens().flatten(0, 1), packed=True, mask=mask)
    assert "packed sequences told apart by cu_seqlens" in note


def test_packed_sequences_of_fewer_queries_than_keys() -> None:
    """Each ends with the last of its own keys."""
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    ends_k = torch.tensor([0, 7, 12], dtype=torch.int32)
    mask = torch.zeros(7, 12, dtype=torch.bool)
    mask[:3, :7] = distance(3, 7) >= 0
    mask[3:, 7:] = distance(4, 5) >= 0

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, ends, ends_k, 4, 7, causal=True)

    check(call, zoo_own.tokens(7, seed=6)[0], zoo_own.tokens()[0], packed=True, mask=mask)


def test_dropout_hides_the_output_and_not_the_logits() -> None:
    torch.manual_seed(0)
    call = lambda q, k, v: flash_attn_func(q, k, v, dropout_p=0.1, causal=True)  # noqa: E731
    assert "attention dropout hides the output" in check(call, zoo_own.tokens(), causal=True)


def test_an_operator_of_another_package_is_not_misread() -> None:
    """flash-attn 3 has one of the same name with other arguments: the layer is named as not seen."""
    name = "flash_attn_3::_flash_attn_forward"

    @torch.library.custom_op(name, mutates_args=())
    def operator(q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None, causal: bool) -> Tensor:
        return torch.zeros_like(q)

    class Model(Attention):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            q, k, v = self.heads(x, x)
            out: Tensor = self.wo(torch.ops.flash_attn_3._flash_attn_forward(q, k, v, None, True).flatten(-2))
            return out

    reading = watched(zoo.drawn(Model(flash_attn_func)), zoo_own.tokens(), backward=False)
    assert [layer.state for layer in reading.layers] == ["uncovered"]
    assert len(reading.problems) == 1
