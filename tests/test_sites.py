"""Which modules are attention, what they are called, and what is said of those that are not seen."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.families import watched
from tests import models, vision  # noqa: F401 (vision before transformers)
from tests.models import (
    E,
    H,
    Mixer,
    Model,
    assert_spectrum,
    causal,
    layer_of,
    linear,
    parts,
    sampled,
    tokens,
)
from torch import Tensor, nn, ops

import attnwatch
from attnwatch.hooks import sites


class Wrapper(nn.Module):
    """As DDP and torch.compile wrap a model: one child of a known name."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner_name = name
        setattr(self, name, inner)

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = getattr(self, self.inner_name)(*inputs)
        return out


@pytest.mark.parametrize("name", sites.WRAPPERS)
def test_layers_keep_their_names_in_wrappers(name: str) -> None:
    """Around the model, and around a layer."""
    weights = parts()
    reading = sampled(Wrapper(Model(Wrapper(Mixer(weights), name)), name), tokens())
    assert [layer.name for layer in reading.layers] == ["mix"]
    assert_spectrum(reading, weights.q, weights.k)


class Inner(nn.Module):
    """The attention call in a module without weights, as many libraries have it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)


def test_a_call_belongs_to_the_innermost_module_with_weights() -> None:
    weights = parts()
    model = Model(Mixer(weights, modules={"core": Inner()}))
    model.mix.call = model.mix.core
    reading = sampled(model, tokens())
    assert [layer.name for layer in reading.layers] == ["mix"]
    assert_spectrum(reading, weights.q, weights.k)


class Projections(nn.Module):
    """Projections in a module of their own, beside the attention."""

    def __init__(self, weights: models.Parts) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(w.flatten(0, 1)) for w in weights[:3])

    def forward(self, x: Tensor) -> models.Heads:
        return models.separate(self, x)


def test_projections_of_another_module() -> None:
    """They are handed up to the module that calls both."""
    weights = parts()
    mixer = Mixer(weights, causal, lambda layer, x: layer.project(x), {"project": Projections(weights)})
    for name in ("q_proj", "k_proj", "v_proj"):
        delattr(mixer, name)
    reading = sampled(Model(mixer), tokens())
    assert_spectrum(reading, weights.q, weights.k)
    assert "W_q = project.q_proj.weight (whole)" in layer_of(reading).note


class Direct(nn.Module):
    """Calls `forward` itself, past every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Mixer(parts())
        self.other = Mixer(parts(seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.attn.forward(x))


def test_a_forward_called_directly_is_never_taken_for_another_layer() -> None:
    """The call is seen in the module around it, and is that module's; the module itself is uncovered."""
    reading = sampled(Direct(), tokens())
    states = {layer.name: layer.state for layer in reading.layers}
    assert states == {"Direct": "verified", "other": "verified", "attn": "uncovered"}
    q, k, _ = parts().project(tokens())
    models.assert_statistics(reading, q, k, "Direct", causal=True)


def test_an_unseen_layer_is_listed_beside_the_seen() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(E, E), nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            s = (self.q_proj(x) @ self.k_proj(x).mT).exp()  # a softmax without a softmax
            return s / s.sum(-1, keepdim=True) @ x

    model = nn.Sequential(Hidden(), Mixer(parts()))
    reading = sampled(model, tokens())
    assert {layer.name: layer.state for layer in reading.layers} == {"0": "uncovered", "1": "verified"}
    assert reading.measured == ("1",)


def test_a_dictionary_of_projections_is_no_layer_that_stayed_unseen() -> None:
    """Nobody calls it; the attention is that of the module around it, and it is looked for there."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = nn.ModuleDict({name: nn.Linear(E, E) for name in "qkv"})

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.made[name](x).unflatten(-1, (H, -1)).transpose(1, 2) for name in "qkv")
            return F.scaled_dot_product_attention(q, k, v)

    assert [(x.name, x.state) for x in sampled(Attention(), tokens()).layers] == [("Attention", "verified")]
    assert sites.expected_sites(nn.Sequential(Attention())) == ["0"]


def test_a_module_may_be_called_as_further_calls_are() -> None:
    """`#c` and `a#1x` are names of modules, `a#1` the second call in `a`: all are seen, none is told to be missing."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({name: Mixer(parts()) for name in ("#c", "a#1x", "a")})

        def forward(self, x: Tensor) -> Tensor:
            for name in ("#c", "a#1x", "a", "a"):
                x = x + self.attention[name](x)
            return x

    found = {layer.name: layer.state for layer in sampled(Named(), tokens()).layers}
    assert found == dict.fromkeys((f"attention.{name}" for name in ("#c", "a#1x", "a", "a#1")), "verified")


@pytest.mark.parametrize(
    ("kind", "attention", "options"),
    [
        ("lfm2", "model.layers.1.self_attn", {"full_attn_idxs": [1]}),
        ("jamba", "model.layers.1.self_attn", {"attn_layer_period": 2, "attn_layer_offset": 1}),
        ("bamba", "model.layers.1.self_attn", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16}),
    ],
)  # fmt: skip
def test_the_other_layers_of_a_hybrid_are_not_missed(kind: str, attention: str, options: dict[str, Any]) -> None:
    """Convolutions and state-space layers have an `in_proj` too; they are no attention that nobody sees."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, pad_token_id=0, **options,
    )  # fmt: skip
    reading = watched(AutoModelForCausalLM.from_config(config), input_ids=torch.randint(16, (2, 12)), use_cache=False)
    assert [(layer.name, layer.state) for layer in reading.layers] == [(attention, "verified")]


def test_the_model_itself_has_a_name_where_it_is_unseen() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.q_proj(x)
            return out

    assert [(x.name, x.state) for x in sampled(Attention(), tokens()).layers] == [("Attention", "uncovered")]


def test_names_of_layers() -> None:
    layer = nn.TransformerDecoderLayer(E, H, 8)
    assert sites.expected_sites(nn.TransformerDecoder(layer, 2)) == [
        f"layers.{n}.{name}" for n in range(2) for name in ("self_attn", "multihead_attn")
    ]
    assert sites.expected_sites(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == []


@pytest.mark.parametrize(
    ("name", "is_query"),
    [(name, True) for name in ("q_proj", "query", "to_q", "qkv", "c_attn", "Wqkv", "query_key_value", "w_q", "q")]
    + [(name, False) for name in ("proj", "fc", "key", "quality", "up_proj", "kv")],
)
def test_children_that_say_query(name: str, is_query: bool) -> None:
    module = nn.Module()
    module.add_module(name, nn.Linear(2, 2))
    assert sites.looks_like_attention(module) == is_query


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class Bare(nn.Module):
    """Attention that no name tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(E, E)


class InForward(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ self.up(x)


class InMethod(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return self.blend(x)

    def blend(self, x: Tensor) -> Tensor:
        return (x @ self.up(x).mT).softmax(-1) @ x


class InFunction(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return attend(self.up(x))


class InOtherFile(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return models.causal(*(self.up(x)[:, None],) * 3)[:, 0]


class InComprehension(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(y @ y.mT).softmax(-1) for y in self.up(x)])


class InObject(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.blend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.blend(self.up(x))


class InChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InMethod()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("kind", [InForward, InMethod, InFunction, InOtherFile, InComprehension, InObject, InChild])
def test_attention_that_only_the_code_tells_of(kind: type[nn.Module]) -> None:
    """Never refused, and seen once it runs."""
    model = kind()
    assert sites.may_hold_attention(model)


def test_attention_without_weights_of_its_own_is_measured() -> None:
    """q and k without a projection: logits only, under the name of the module around."""
    reading = sampled(InForward(), tokens())
    [layer] = reading.layers
    assert (layer.name, layer.state) == ("InForward", "logits_only")
    models.assert_statistics(reading, tokens()[:, None], tokens()[:, None], "InForward", scale=1.0)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x))


class Reflective(nn.Module):
    """Its code names a type that describes its own code, and a namespace that has whatever it is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(x, FunctionType)
        y: Tensor = ops.relu(x)
        return y


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GELU()), Convolutional(), nn.LSTM(2, 2), Reflective()],
)
def test_a_model_without_attention_is_refused(model: nn.Module, tmp_path: Path) -> None:
    """Before training, in one line, and nothing is left behind."""
    assert not sites.may_hold_attention(model)
    with pytest.raises(attnwatch.UsageError, match=r"^expected a model with attention, found none in \w+ .*$"):
        attnwatch.watch(model, run=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    other: Any = {"model": 1}
    with pytest.raises(attnwatch.UsageError, match=r"^expected a torch.nn.Module to watch, found dict$"):
        attnwatch.watch(other, run=tmp_path / "run")
