"""Which rows are W_q and W_k: the right ones are proved, every other reading of the same projections fails the proof,
and the spectra are those of the right weights, head by head, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.families import watched
from tests import zoo
from tests.models import assert_spectrum, layer_of, values_of
from torch import Tensor

from attnwatch.hooks import weights
from attnwatch.hooks.probe import Reading

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)

H, D = 4, 8
Pair = tuple[Tensor, Tensor]


def separate(module: Any) -> Pair:
    return heads(module.q_proj.weight), heads(module.k_proj.weight)


def heads(weight: Tensor) -> Tensor:
    """`[n * D, in]` to `[n, D, in]`."""
    return weight.detach().unflatten(0, (-1, D))


def contiguous(weight: Tensor, kv: int = H) -> Pair:
    """Rows of all queries, then of all keys, then of all values."""
    return heads(weight[: H * D]), heads(weight[H * D : (H + kv) * D])


def per_head(weight: Tensor) -> Pair:
    """Rows of a head together: q, k, v."""
    q, k, _ = weight.detach().view(H, 3, D, -1).unbind(1)
    return q, k


def falcon(module: Any) -> Pair:
    """Two groups of two queries, a key and a value."""
    groups = module.query_key_value.weight.detach().view(2, 4, D, -1)
    return groups[:, :2].flatten(0, 1), groups[:, 2]


def per_head_gains(module: Any, offset: float = 0.0) -> Pair:
    (q, k), norms = separate(module), (module.q_norm, module.k_norm)
    gain_q, gain_k = (offset + norm.weight.detach() for norm in norms)
    return q * gain_q[:, None], k * gain_k[:, None]


def gated(module: Any) -> Pair:
    """Each head's rows of q, then of the gate at its output; gains are 1 + the weight."""
    q = module.q_proj.weight.detach().unflatten(0, (H, 2 * D))[:, :D]
    return q * (1 + module.q_norm.weight.detach())[:, None], heads(module.k_proj.weight) * (
        1 + module.k_norm.weight.detach()
    )[:, None]


def across_heads(module: Any) -> Pair:
    q, k = separate(module)
    return q * module.q_norm.weight.detach().view(-1, D, 1), k * module.k_norm.weight.detach().view(-1, D, 1)


def latent(module: Any) -> Pair:
    """The halves of queries and keys that carry no position: 8 of 12 features, 8 of [8 k, 6 v]."""
    q = module.q_b_proj.weight.detach().unflatten(0, (H, 12))[:, :8]
    return q, module.kv_b_proj.weight.detach().unflatten(0, (H, 14))[:, :8]


RIGHT: dict[str, tuple[str, Callable[[Any], Pair]]] = {
    "Llama": ("model.layers.1.self_attn", separate),
    "GPT-2": ("transformer.h.1.attn", lambda m: contiguous(m.c_attn.weight.t())),
    "GPT-NeoX": ("gpt_neox.layers.1.attention", lambda m: per_head(m.query_key_value.weight)),
    "BLOOM": ("transformer.h.1.self_attention", lambda m: per_head(m.query_key_value.weight)),
    "Falcon": ("transformer.h.1.self_attention", falcon),
    "Phi-3": ("model.layers.1.self_attn", lambda m: contiguous(m.qkv_proj.weight, kv=2)),
    "ModernBERT": ("model.layers.1.attn", lambda m: contiguous(m.Wqkv.weight)),
    "Qwen3": ("model.layers.1.self_attn", per_head_gains),
    "Qwen3-Next": ("model.layers.1.self_attn", gated),
    "Gemma 3": ("model.layers.1.self_attn", lambda m: per_head_gains(m, 1.0)),
    "OLMo 2": ("model.layers.1.self_attn", across_heads),
    "DeepSeek-V3": ("model.layers.1.self_attn", latent),
    "Whisper": ("model.decoder.layers.1.encoder_attn", separate),
    "T5": ("decoder.block.1.layer.1.EncDecAttention", lambda m: (heads(m.q.weight), heads(m.k.weight))),
    "DeBERTa-v2": (
        "deberta.encoder.layer.1.attention.self",
        lambda m: (heads(m.query_proj.weight), heads(m.key_proj.weight)),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_spectra_are_those_of_the_right_weights(name: str) -> None:
    model = zoo.build(name, "eager")
    site, right = RIGHT[name]
    assert_spectrum(watched(model, **zoo.inputs(name)), *right(model.get_submodule(site)), name=site)


LAYOUTS = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen3", "Gemma 2", "Gemma 3"), ("q_proj", "k_proj", "whole", "whole")),
    "Qwen3-Next": ("q_proj", "k_proj", "4 heads of [8 q, 8 gate]", "whole"),
    **dict.fromkeys(("OLMo 2", "gpt-oss", "GPT-Neo", "ViT", "CLIP"), ("q_proj", "k_proj", "whole", "whole")),
    **dict.fromkeys(("BART", "Whisper"), ("q_proj", "k_proj", "whole", "whole")),
    **dict.fromkeys(("BERT", "RoBERTa"), ("query", "key", "whole", "whole")),
    "T5": ("q", "k", "whole", "whole"),
    "DeBERTa-v2": ("query_proj", "key_proj", "whole", "whole"),
    "Phi-3": ("qkv_proj", "qkv_proj", "rows 0 to 32", "rows 32 to 48"),
    "GPT-2": ("c_attn", "c_attn", "rows 0 to 32", "rows 32 to 64"),
    "GPT-2 (upcast)": ("c_attn", "c_attn", "rows 0 to 32", "rows 32 to 64"),
    "ModernBERT": ("Wqkv", "Wqkv", "rows 0 to 32", "rows 32 to 64"),
    **dict.fromkeys(("GPT-NeoX", "BLOOM"), ("query_key_value",) * 2 + ("4 groups of [1 q, k, v]",) * 2),
    "Falcon": ("query_key_value",) * 2 + ("2 groups of [2 q, k, v]",) * 2,
    "DeepSeek-V3": (
        "q_b_proj",
        "kv_b_proj",
        "whole",
        "4 heads of [8 k, 6 v]; 4 features that all heads share are left out",
    ),
}
"""Family -> the weights of q and k, and how they lie in them."""


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_wrong_layout_fails_the_proof(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By far: the limit is 2e-3, and 5e-2 in half precision."""
    sides: list[tuple[str, weights.Side]] = []
    look = weights.look

    def spy(shape: Any, *rest: Any) -> weights.Side | None:
        side = look(shape, *rest)
        assert side is not None
        sides.append((shape.side, side))
        return side

    monkeypatch.setattr(weights, "look", spy)
    watched(zoo.build(name, "eager"), **zoo.inputs(name))
    assert len(sides) >= 4
    weight_q, weight_k, layout_q, layout_k = LAYOUTS[name]
    right = {"q": (f"{weight_q}.weight", layout_q), "k": (f"{weight_k}.weight", layout_k)}
    for which, side in sides:
        same = np.array([(key.weight, key.layout) == right[which] for key in side.keys])
        errors = side.errors.numpy()
        assert errors[same].min() < 1e-5
        assert errors[~same].min(initial=1.0) > 0.1, side.keys


def bound(reading: Reading, name: str) -> Any:
    return values_of(reading, name)["logit_bound"]


@pytest.mark.parametrize(("name", "offset", "scale"), [("Qwen3", 0.0, D**-0.5), ("Gemma 3", 1.0, 16**-0.5)])
def test_bounds_of_norms_per_head(name: str, offset: float, scale: float) -> None:
    """scale * d * max|gain_q| * max|gain_k|, whether the gain is w or 1 + w."""
    model = zoo.build(name)
    reading = watched(model, **zoo.inputs(name))
    module = model.model.layers[0].self_attn
    gain_q, gain_k = (float((offset + norm.weight.detach()).abs().max()) for norm in (module.q_norm, module.k_norm))
    np.testing.assert_allclose(bound(reading, "model.layers.0.self_attn"), scale * D * gain_q * gain_k, rtol=1e-5)
    assert layer_of(reading, "model.layers.0.self_attn").qk_norm == "rms per head"


def test_bound_of_a_norm_across_heads() -> None:
    """scale * d * sqrt(H * Hk) * max|gain_q| * max|gain_k|."""
    model = zoo.build("OLMo 2")
    reading = watched(model, **zoo.inputs("OLMo 2"))
    module = model.model.layers[0].self_attn
    gain_q, gain_k = (float(norm.weight.detach().abs().max()) for norm in (module.q_norm, module.k_norm))
    expected = D**-0.5 * D * (4 * 2) ** 0.5 * gain_q * gain_k
    np.testing.assert_allclose(bound(reading, "model.layers.0.self_attn"), expected, rtol=1e-5)
    assert layer_of(reading, "model.layers.0.self_attn").qk_norm == "rms across heads"


def test_latent_attention_says_what_its_spectrum_leaves_out() -> None:
    reading = watched(zoo.build("DeepSeek-V3"), **zoo.inputs("DeepSeek-V3"))
    layer = layer_of(reading, "model.layers.0.self_attn")
    assert "kv_b_proj.weight (4 heads of [8 k, 6 v]; 4 features that all heads share are left out)" in layer.note
    assert layer.head_dim == 12


def test_queries_scaled_before_the_call_are_proved_all_the_same() -> None:
    """Whisper multiplies queries by d**-0.5 and calls with a scale of 1: logits are not scaled twice."""
    model = zoo.build("Whisper")
    reading = watched(model, **zoo.inputs("Whisper"))
    layer = layer_of(reading, "model.encoder.layers.0.self_attn")
    assert layer.state == "verified"
    values = values_of(reading, "model.encoder.layers.0.self_attn")
    norms = values["query_norm_max"] * values["key_norm_max"]
    assert (values["logit_max"] <= norms * (1 + 1e-5)).all()
    assert torch.isfinite(torch.tensor(values["qk_rank_ratio"])).all()
