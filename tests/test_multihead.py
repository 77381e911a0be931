"""torch's own attention modules in training: `nn.MultiheadAttention` and the Transformer layers built of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.models import (
    B,
    D,
    E,
    H,
    Model,
    T,
    assert_spectrum,
    assert_statistics,
    layer_of,
    sampled,
    step,
    tokens,
    values_of,
)
from torch import Tensor, nn

from attnwatch.hooks.probe import Probe, Reading

S = 5  # keys of cross attention
GENERATOR = torch.Generator().manual_seed(6)
HIDDEN = ~torch.ones(T, T).tril().bool()  # torch's masks are True where *not* visible
HIDDEN_3D = (torch.rand(B * H, T, T, generator=GENERATOR) < 0.3) & ~torch.eye(T).bool()
PADDED = torch.arange(T) >= torch.tensor([7, 5, 2])[:, None]  # right padding
ADDED = torch.randn(T, T, generator=GENERATOR)


def attention(width: int = E, **options: Any) -> nn.MultiheadAttention:
    """Weights large enough for maps that are not uniform; biases that are not zero."""
    torch.manual_seed(0)
    made = nn.MultiheadAttention(width, H, **{"batch_first": True, **options})
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "out_proj" not in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=GENERATOR) * (0.3 if parameter.dim() == 2 else 1)
                )
    return made


def weights_of(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    """W_q and W_k `[H, d, in]`."""
    if module.in_proj_weight is not None:
        w_q, w_k, _ = module.in_proj_weight.detach().chunk(3)
    else:
        w_q, w_k = module.q_proj_weight.detach(), module.k_proj_weight.detach()
    return w_q.unflatten(0, (H, -1)), w_k.unflatten(0, (H, -1))


def projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """float64 q and k `[B, H, T, d]` of `query [B, T, E]` and `key [B, S, E']`."""
    b_q, b_k = [0.0, 0.0] if module.in_proj_bias is None else module.in_proj_bias.detach().double().chunk(3)[:2]
    w_q, w_k = (w.flatten(0, 1).double() for w in weights_of(module))
    q, k = query.double() @ w_q.T + b_q, key.double() @ w_k.T + b_k
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.detach().double().expand(len(k), 1, -1)], 1)
    if module.add_zero_attn:
        k = torch.cat([k, torch.zeros(len(k), 1, k.shape[-1])], 1)
    q, k = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, k))
    return q, k


class Caller(nn.Module):
    """Calls the attention with the same other arguments in every forward."""

    def __init__(self, module: nn.MultiheadAttention, memory: Tensor | None = None, **call: Any) -> None:
        super().__init__()
        self.attn, self.memory, self.options = module, memory, call

    def forward(self, x: Tensor) -> Tensor:
        memory = x if self.memory is None else self.memory
        out: Tensor = self.attn(x, memory, memory, **self.options)[0]
        return out


def told(module: nn.MultiheadAttention, x: Tensor, memory: Tensor | None = None, **call: Any) -> Reading:
    reading = sampled(Model(Caller(module, memory, **call)), x)
    assert not reading.problems
    assert [layer.name for layer in reading.layers] == ["mix.attn"]
    return reading


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, {}),
        ({"attn_mask": HIDDEN}, {"mask": ~HIDDEN}),
        ({"attn_mask": HIDDEN, "is_causal": True}, {"causal": True}),
        ({"attn_mask": ADDED}, {"mask": ADDED}),
        ({"attn_mask": ADDED.masked_fill(HIDDEN, -torch.inf)}, {"mask": ADDED.masked_fill(HIDDEN, -torch.inf)}),
        ({"attn_mask": HIDDEN_3D}, {"mask": ~HIDDEN_3D.unflatten(0, (B, H))}),
        ({"key_padding_mask": PADDED}, {"mask": ~PADDED[:, None, None]}),
        ({"key_padding_mask": PADDED, "attn_mask": HIDDEN}, {"mask": ~PADDED[:, None, None] & ~HIDDEN}),
        (
            {"key_padding_mask": torch.zeros(B, T).masked_fill(PADDED, -torch.inf), "attn_mask": ADDED},
            {"mask": ADDED.expand(B, 1, T, T).masked_fill(PADDED[:, None, None], -torch.inf)},
        ),
        ({"average_attn_weights": False}, {}),
    ],
    ids=["plain", "bool", "causal", "float", "float that hides", "3-D", "padding", "padding, bool", "floats", "heads"],
)
def test_self_attention(need_weights: bool, call: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every mask, on both of torch's routes."""
    module = attention()
    reading = told(module, tokens(), need_weights=need_weights, **call)
    assert_statistics(reading, *projected(module, tokens(), tokens()), "mix.attn", **expected)
    assert_spectrum(reading, *weights_of(module), "mix.attn")


@pytest.mark.parametrize(
    "options", [{"batch_first": False}, {"dropout": 0.5}, {"bias": False}, {"dtype": torch.float64}]
)
def test_options(options: dict[str, Any]) -> None:
    module = attention(**options)
    x = tokens().to(options.get("dtype", torch.float32))
    first = options.get("batch_first", True)
    model = Caller(module)
    reading = sampled(model, x if first else x.transpose(0, 1))
    assert_statistics(reading, *projected(module, x, x), "attn")
    assert_spectrum(reading, *weights_of(module), "attn")


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, {}),
        ({"key_padding_mask": PADDED}, {"mask": ~torch.nn.functional.pad(PADDED, (0, 2))[:, None, None]}),
        ({"attn_mask": ADDED}, {"mask": torch.nn.functional.pad(ADDED, (0, 2))}),
    ],
)
def test_a_learned_key_and_a_zero_key(need_weights: bool, call: dict[str, Any], expected: dict[str, Any]) -> None:
    """`add_bias_kv` and `add_zero_attn` add two keys that every query sees."""
    module = attention(add_bias_kv=True, add_zero_attn=True)
    reading = told(module, tokens(), need_weights=need_weights, **call)
    q, k = projected(module, tokens(), tokens())
    assert k.shape[2] == T + 2
    assert_statistics(reading, q, k, "mix.attn", **expected)
    assert_spectrum(reading, *weights_of(module), "mix.attn")


@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 9}, {"kdim": 10, "vdim": 10}])
def test_cross_attention(sizes: dict[str, int]) -> None:
    """Keys of another length and width, with weights of their own."""
    module = attention(**sizes)
    keys = tokens(B, S, sizes.get("kdim", E), seed=3)
    model = CrossCaller(module, keys, tokens(B, S, sizes.get("vdim", E), seed=4))
    reading = sampled(model, tokens())
    assert_statistics(reading, *projected(module, tokens(), keys), "attn")
    assert_spectrum(reading, *weights_of(module), "attn")


class CrossCaller(nn.Module):
    def __init__(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.attn, self.key, self.value = module, key, value

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, self.key, self.value)[0]
        return out


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, HIDDEN, HIDDEN_3D[:H]])
def test_one_sequence_without_a_batch(need_weights: bool, mask: Tensor | None) -> None:
    module = attention()
    x = tokens(T, E)
    reading = told(module, x, need_weights=need_weights, attn_mask=mask)
    q, k = projected(module, x[None], x[None])
    assert_statistics(reading, q, k, "mix.attn", mask=None if mask is None else ~mask)


class Inputs:
    """What each attention module was given, in the order of its calls."""

    def __init__(self, model: nn.Module) -> None:
        self.given: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                module.register_forward_pre_hook(self._keep(name))

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self.given[name] = (arguments[0].detach().clone(), arguments[1].detach().clone())

        return hook


def agrees(model: nn.Module, reading: Reading, given: Inputs, causal: tuple[str, ...] = ()) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert [layer.name for layer in reading.layers] == names
    assert not reading.problems
    for name in names:
        module = model.get_submodule(name)
        q, k = projected(module, *given.given[name])
        assert_statistics(reading, q, k, name, causal=name.endswith(causal) if causal else False)
        assert_spectrum(reading, *weights_of(module), name)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    given = Inputs(model)
    agrees(model, sampled(model, tokens()), given)


def test_decoder() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 32, batch_first=True), 2)
    given = Inputs(model)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    reading = sampled(model, tokens(), tokens(B, S, E, seed=3), tgt_mask=mask, tgt_is_causal=True)
    agrees(model, reading, given, causal=("self_attn",))


def test_a_whole_transformer() -> None:
    torch.manual_seed(2)
    model = nn.Transformer(E, H, 1, 1, 32, batch_first=True)
    given = Inputs(model)
    agrees(model, sampled(model, tokens(B, S, E, seed=3), tokens()), given)


def test_chosen_sequences() -> None:
    """Only the sequences of the sample's turn are projected again, and theirs are the numbers."""

    module = attention()
    model = Caller(module).train()
    x = tokens(5, T, E)
    probe = Probe(model, rows=None, sequences=2)
    for turn in ([0, 1], [2, 3], [4, 0]):
        q, k = projected(module, x[turn], x[turn])
        reading = step(probe, model, x)
        assert_statistics(reading, q, k, "attn")
        expected = torch.linalg.vector_norm(q, dim=-1).amax((0, 2)).numpy()
        np.testing.assert_allclose(values_of(reading, "attn")["query_norm_max"], expected, rtol=1e-5)
    assert layer_of(reading, "attn").head_dim == D
