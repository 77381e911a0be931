"""Numbers of layers outside of Hugging Face transformers, against maps and weights worked out from the layer's own
parameters; low-rank updates of PEFT."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.families import watched
from tests import zoo, zoo_others, zoo_own
from tests.models import assert_spectrum, assert_statistics, layer_of, values_of
from tests.returned_maps import of_maps
from torch import Tensor

from attnwatch.hooks.probe import Reading

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)

H, D = 4, 8


def inputs_of(model: Any, site: str, *inputs: Tensor) -> Tensor:
    """What a module gets."""
    got: list[Tensor] = []
    handle = model.get_submodule(site).register_forward_pre_hook(lambda _, arguments: got.append(arguments[0].detach()))
    with torch.no_grad():
        model(*inputs)
    handle.remove()
    return got[0]


def heads(x: Tensor) -> Tensor:
    return x.detach().unflatten(-1, (-1, D)).transpose(1, 2)


# --- timm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["ViT", "ViT, q_norm and k_norm"])
def test_timm_vit(name: str, fused: bool) -> None:
    model: Any = zoo_others.timm(name, fused)
    attention, site = model.blocks[1].attn, "blocks.1.attn"
    q, k, _ = (heads(part) for part in attention.qkv(inputs_of(model, site, zoo_others.images())).chunk(3, -1))
    w_q, w_k, _ = attention.qkv.weight.detach().unflatten(0, (3, H, D))
    if "norm" in name:
        q, k = attention.q_norm(q).detach(), attention.k_norm(k).detach()
        w_q, w_k = (w * norm.weight.detach()[:, None] for w, norm in ((w_q, attention.q_norm), (w_k, attention.k_norm)))
    reading = watched(model, zoo_others.images())
    assert_statistics(reading, q, k, name=site)
    assert_spectrum(reading, w_q, w_k, name=site)
    assert layer_of(reading, site).qk_norm == ("layer per head" if "norm" in name else "")


@pytest.mark.parametrize("fused", [True, False])
def test_timm_swin(fused: bool) -> None:
    """A window is a sequence; a learned bias for relative positions, and -100 between the parts of shifted windows: too
    little to hide a key by the definitions, so that all are visible."""
    model: Any = zoo_others.timm("Swin", fused)
    site = "layers.0.blocks.1.attn"
    attention = model.get_submodule(site)
    x = inputs_of(model, site, zoo_others.images())
    q, k, _ = (heads(part) for part in attention.qkv(x).chunk(3, -1))
    bias = attention._get_rel_pos_bias().detach()
    mask = model.get_submodule("layers.0.blocks.1").attn_mask
    assert (mask == -100).any()
    logits = q @ k.mT * D**-0.5 + bias + mask.repeat(len(q) // len(mask), 1, 1)[:, None]
    maps = logits.double().softmax(-1)
    reading = watched(model, zoo_others.images())
    entropy, sink = of_maps(maps)
    values = values_of(reading, site)
    np.testing.assert_allclose(values["entropy"], entropy, atol=1e-5)
    np.testing.assert_allclose(values["sink_mass"], sink, atol=1e-5)
    w_q, w_k, _ = attention.qkv.weight.detach().unflatten(0, (3, 2, D))
    assert_spectrum(reading, w_q, w_k, name=site)


def test_timm_xcit_is_named_and_not_measured() -> None:
    """Its maps are of channels over channels. The two layers of its class token attend over positions."""
    reading = watched(zoo_others.timm("XCiT"), zoo_others.images())
    states = {layer.name: layer.state for layer in reading.layers}
    assert states == {
        "blocks.0.attn": "uncovered",
        "blocks.1.attn": "uncovered",
        "cls_attn_blocks.0.attn": "verified",
        "cls_attn_blocks.1.attn": "verified",
    }
    assert np.isnan(reading.values[:, [reading.measured.index(f"blocks.{i}.attn") for i in (0, 1)]]).all()
    assert layer_of(reading, "blocks.0.attn").note == "attends over channels, not over positions"


# --- x-transformers -----------------------------------------------------------------------------------------------

SITE = "attn_layers.layers.2.1"


def x_heads(name: str) -> tuple[Any, Reading, Tensor, Tensor]:
    """Attention, reading, and queries and keys as the projections give them."""
    model: Any = zoo_others.x_transformer(name)
    x = inputs_of(model, SITE, zoo_others.ids())
    attention = model.get_submodule(SITE)
    return attention, watched(model, zoo_others.ids()), heads(attention.to_q(x)), heads(attention.to_k(x))


@pytest.mark.parametrize("name", ["plain", "flash"])
def test_x_transformers(name: str) -> None:
    attention, reading, q, k = x_heads(name)
    assert_statistics(reading, q, k, name=SITE, causal=True)
    w_q, w_k = (w.weight.detach().unflatten(0, (H, D)) for w in (attention.to_q, attention.to_k))
    assert_spectrum(reading, w_q, w_k, name=SITE)


def test_x_transformers_l2_norm() -> None:
    """Unit queries and keys, times 10."""
    _, reading, q, k = x_heads("qk_norm")
    assert_statistics(reading, F.normalize(q, dim=-1), F.normalize(k, dim=-1), name=SITE, causal=True, scale=10.0)
    np.testing.assert_allclose(values_of(reading, SITE)["logit_bound"], 10.0, rtol=1e-5)


def test_x_transformers_slopes_of_linear_biases() -> None:
    """Two heads have one, two have none."""
    _, reading, q, k = x_heads("ALiBi")
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    slopes = torch.tensor([2.0**-4, 2.0**-8, 0.0, 0.0])
    assert_statistics(reading, q, k, name=SITE, causal=True, bias=(-slopes[:, None, None] * distance)[None])


def test_x_transformers_soft_clamp() -> None:
    _, reading, q, k = x_heads("soft-clamped")
    assert_statistics(reading, q, k, name=SITE, causal=True, softcap=5.0)


def test_x_transformers_repeats_its_key_heads_one_round_after_the_other() -> None:
    """Query head h uses key head h % 2, not h // 2."""
    attention, reading, _, _ = x_heads("rotary, grouped")
    w_q = attention.to_q.weight.detach().unflatten(0, (H, D))
    w_k = attention.to_k.weight.detach().unflatten(0, (2, D))
    layer = layer_of(reading, SITE)
    assert (layer.heads, layer.kv_heads) == (4, 2)
    assert_spectrum(reading, w_q, w_k[[0, 1, 0, 1]], name=SITE)


# --- our own ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_with_functions_of_its_own() -> None:
    """A slope a head as score_mod, causal documents as block mask, two key heads."""
    model: Any = zoo_own.made(zoo_own.Flex())
    documents = zoo_own.documents()
    reading = watched(model, zoo_own.tokens(), documents, backward=False)
    module = model.attention
    q, k = heads(module.q_proj(zoo_own.tokens())), heads(module.k_proj(zoo_own.tokens()))
    row, key = torch.arange(12)[:, None], torch.arange(12)
    bias = -module.slopes.detach()[:, None, None] * (row - key).abs()
    mask = (row >= key) & (documents[:, :, None] == documents[:, None])
    assert_statistics(reading, q, k, name="attention", mask=mask[:, None], bias=bias[None])
    w_q, w_k = (w.weight.detach().unflatten(0, (-1, D)) for w in (module.q_proj, module.k_proj))
    assert_spectrum(reading, w_q, w_k, name="attention")


@pytest.mark.parametrize("length", [7, 12])
def test_joint_attention_over_two_streams(length: int) -> None:
    """Each with its own projection and its own norms, also when both are equally long. The spectrum is that of the
    operator on both inputs side by side."""
    model: Any = zoo_own.made(zoo_own.Joint())
    module = model.attention
    text, image = zoo_own.tokens(length, seed=6), zoo_own.tokens()
    reading = watched(model, text, image)
    with torch.no_grad():
        (q_t, k_t, _), (q_i, k_i, _) = module.split(text, "text"), module.split(image, "image")
    assert_statistics(reading, torch.cat([q_t, q_i], 2), torch.cat([k_t, k_i], 2), name="attention")
    folded = {}
    for stream in ("text", "image"):
        w_q, w_k, _ = getattr(module, f"qkv_{stream}").weight.detach().unflatten(0, (3, H, D))
        for side, w in (("q", w_q), ("k", w_k)):
            folded[side, stream] = w * getattr(module, f"norm_{side}_{stream}").weight.detach()[:, None]
    w_q, w_k = (torch.cat([folded[side, "text"], folded[side, "image"]], -1) for side in "qk")
    assert_spectrum(reading, w_q, w_k, name="attention")
    gains = [float(getattr(module, f"norm_{name}").weight.detach().abs().max()) for name in ("q_text", "q_image")]
    keys = [float(getattr(module, f"norm_{name}").weight.detach().abs().max()) for name in ("k_text", "k_image")]
    bound = values_of(reading, "attention")["logit_bound"]
    np.testing.assert_allclose(bound, math.sqrt(D) * max(gains) * max(keys), rtol=1e-5)
    assert layer_of(reading, "attention").qk_norm == "rms per head"


# --- low-rank updates ---------------------------------------------------------------------------------------------

LLAMA = "base_model.model.model.layers.1.self_attn"


def spectrum_is_of(model: Any, batch: dict[str, Tensor], site: str, w_q: Tensor, w_k: Tensor) -> None:
    """`[H * D, in]` and `[Hk * D, in]`."""
    reading = watched(model, **batch)
    assert_spectrum(reading, w_q.unflatten(0, (-1, D)), w_k.unflatten(0, (-1, D)), name=site)


def updated(layer: Any, *adapters: str) -> Tensor:
    """Base weight and updates of a PEFT layer, by the definition of LoRA: W + (alpha / r) B A, with alpha / r = 2."""
    weight: Tensor = layer.base_layer.weight.detach().clone()
    for adapter in adapters:
        weight += 2.0 * layer.lora_B[adapter].weight.detach() @ layer.lora_A[adapter].weight.detach()
    return weight


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_low_rank_updates_belong_to_the_weights(dropout: float) -> None:
    """Dropout in the branch of the updates is no part of the weights."""
    model = zoo_others.with_lora(zoo.build("Llama"), dropout=dropout)
    attention = model.get_submodule(LLAMA)
    w_q, w_k = updated(attention.q_proj, "default"), updated(attention.k_proj, "default")
    assert (w_q - attention.q_proj.base_layer.weight).abs().max() > 0.1
    spectrum_is_of(model, zoo.inputs("Llama"), LLAMA, w_q, w_k)


def test_two_adapters_at_once() -> None:
    model = zoo_others.with_lora(zoo.build("Llama"))
    model.add_adapter("other", zoo_others.lora())
    model.base_model.set_adapter(["default", "other"])
    zoo_others.grow(model, seed=4)
    attention = model.train().get_submodule(LLAMA)
    both = ("default", "other")
    spectrum_is_of(
        model, zoo.inputs("Llama"), LLAMA, updated(attention.q_proj, *both), updated(attention.k_proj, *both)
    )
    model.base_model.set_adapter("other")
    one = ("other",)
    spectrum_is_of(model, zoo.inputs("Llama"), LLAMA, updated(attention.q_proj, *one), updated(attention.k_proj, *one))


def test_merged_updates_are_not_counted_twice() -> None:
    model = zoo_others.with_lora(zoo.build("Llama"))
    attention = model.get_submodule(LLAMA)
    w_q, w_k = updated(attention.q_proj, "default"), updated(attention.k_proj, "default")
    model.merge_adapter()
    spectrum_is_of(model, zoo.inputs("Llama"), LLAMA, w_q, w_k)


def test_disabled_updates_do_not_count() -> None:
    model = zoo_others.with_lora(zoo.build("Llama"))
    attention = model.get_submodule(LLAMA)
    base_q, base_k = (layer.base_layer.weight.detach() for layer in (attention.q_proj, attention.k_proj))
    with model.disable_adapter():
        spectrum_is_of(model, zoo.inputs("Llama"), LLAMA, base_q, base_k)


def test_updates_of_a_fused_transposed_projection() -> None:
    """GPT-2: a Conv1D, whose weight is (in, out)."""
    model = zoo_others.with_lora(zoo.build("GPT-2"), targets=("c_attn",))
    site = "base_model.model.transformer.h.1.attn"
    layer = model.get_submodule(site).c_attn
    delta = 2.0 * layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight.detach()
    w_q, w_k, _ = (layer.base_layer.weight.detach().t() + delta).chunk(3)
    spectrum_is_of(model, zoo.inputs("GPT-2"), site, w_q, w_k)
