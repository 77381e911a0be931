"""Which saved tensors are W_q and W_k: as a live forward proves them; what is not settled is named, never guessed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.families import watched
from safetensors.torch import save_file
from tests import zoo
from torch import Tensor, nn

from attnwatch.hooks.checkpoints import open_checkpoint
from attnwatch.hooks.facts import FUSED, GATED, UNIT_GAIN, facts_of
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.placement import Gain, Placed, Unplaced, natural, place
from attnwatch.hooks.probe import Reading
from attnwatch.hooks.spectrum import SPECTRUM
from attnwatch.hooks.weight_files import Entry
from attnwatch.monitor.scan import layer_values

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)

NAMES = [metric.name for metric in METRICS]
ROWS = [NAMES.index(metric.name) for metric in SPECTRUM]

_GPT2 = {**zoo._TOKENS, **zoo._GPT2}
_OTHERS = {
    "OpenAI GPT": zoo.Family("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", _GPT2),
    "ImageGPT": zoo.Family("ImageGPTConfig", "ImageGPTForCausalImageModeling", _GPT2),
    "Decision Transformer": zoo.Family(
        "DecisionTransformerConfig", "DecisionTransformerGPT2Model", {**_GPT2, "hidden_size": 32}
    ),
    "MPT": zoo.Family("MptConfig", "MptForCausalLM", {**zoo._TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "GPT-NeoX Japanese": zoo.Family(
        "GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM",
        {**zoo._TEXT, "attention_dropout": 0.0, "hidden_dropout": 0.0, "intermediate_multiple_size": 2},
    ),
    "GPT BigCode": zoo.Family("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**_GPT2, "multi_query": True}),
    "GPT BigCode, all heads": zoo.Family("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**_GPT2, "multi_query": False}),
    "Persimmon": zoo.Family(
        "PersimmonConfig", "PersimmonForCausalLM",
        {**zoo._TEXT, "attention_dropout": 0.0, "hidden_dropout": 0.0, "qk_layernorm": True},
    ),
    "Falcon, one key head": zoo.Family(
        "FalconConfig", "FalconForCausalLM",
        {**zoo._TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True},
    ),
    "Falcon, all key heads": zoo.Family(
        "FalconConfig", "FalconForCausalLM",
        {**zoo._TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": False},
    ),
    "Cohere": zoo.Family("CohereConfig", "CohereForCausalLM", {**zoo._GROUPED, "use_qk_norm": True}),
    "DistilBERT": zoo.Family(
        "DistilBertConfig", "DistilBertForMaskedLM",
        {**zoo._TOKENS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0,
         "attention_dropout": 0.0},
    ),
}  # fmt: skip
COMPARED = {**zoo.FAMILIES, **_OTHERS}
RENAMED = {"ViT": ("vit.encoder.layer.{}.attention.attention", "vit.layers.{}.attention")}
"""Family -> how the library names its layers on the disk, and in the model."""


def built(name: str) -> Any:
    family = COMPARED[name]
    if name in zoo.FAMILIES:
        return zoo.build(name, "eager")
    library = zoo.transformers()
    config = getattr(library, family.config)(**family.options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return zoo.drawn(getattr(library, family.model)._from_config(config, attn_implementation="eager"))


def batch(name: str) -> dict[str, Tensor]:
    if name in zoo.FAMILIES:
        return zoo.inputs(name)
    tokens = zoo.inputs("Llama")
    if name == "Decision Transformer":
        return {"inputs_embeds": torch.randn(zoo.BATCH, zoo.LENGTH, 32)}
    return {"input_ids": tokens["input_ids"]} if name == "ImageGPT" else tokens


def live(name: str, model: Any) -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """Spectra `[S, H]`, bound `[H]` and kind of norm that one watched forward and its proof give, by layer."""
    reading: Reading = watched(model, **batch(name))
    return {
        layer.name: (reading.values[ROWS, at], reading.values[NAMES.index("logit_bound"), at], layer.qk_norm)
        for at, layer in enumerate(reading.layers)
    }


def placed_in(folder: Path, **options: Any) -> list[Placed | Unplaced]:
    checkpoint = open_checkpoint(folder)
    return place(checkpoint.tensors, checkpoint.config, **options)


@pytest.mark.parametrize("name", COMPARED)
def test_the_weights_are_those_that_a_forward_proves(name: str, tmp_path: Path) -> None:
    """Watched live, the layout is proved against captured q and k; from the files alone the numbers are the same."""
    model = built(name)
    model.save_pretrained(tmp_path)
    proved = live(name, model)
    checkpoint = open_checkpoint(tmp_path)
    found = place(checkpoint.tensors, checkpoint.config)
    assert len(found) == len(proved)
    for layer in found:
        assert isinstance(layer, Placed), layer
        saved, loaded = RENAMED.get(name, ("", ""))
        spoken = next((loaded.format(n) for n in range(2) if saved and layer.layer == saved.format(n)), layer.layer)
        spectra, bound, norm = next(values for site, values in proved.items() if site.endswith(spoken))
        values = layer_values(layer, checkpoint.read(layer.names))
        # A live gain is the response of a norm with its epsilon of 1e-5.
        np.testing.assert_allclose(values[: len(SPECTRUM)], spectra, rtol=3e-5, atol=1e-6)
        np.testing.assert_allclose(values[len(SPECTRUM)], bound, rtol=1e-3)
        assert bool(layer.qk_norm) == bool(norm)


def test_no_family_is_in_the_tables_unproved() -> None:
    """Every row of the tables is compared with a forward above."""
    library = zoo.transformers()
    compared = {getattr(library, family.config).model_type for family in COMPARED.values()}
    assert set(FUSED) | GATED <= compared
    assert {name for name in UNIT_GAIN if name not in compared and not name.startswith(tuple(NORMS))} == set()


NORMS = {
    "gemma3": "Gemma3RMSNorm", "qwen3_next": "Qwen3NextRMSNorm", "t5gemma2": "T5Gemma2RMSNorm",
    "step3p7": "Step3p7RMSNorm", "step3p5": "Step3p7RMSNorm", "minimax_m3_vl": "MiniMaxM3VLRMSNorm",
    "qwen3": "Qwen3RMSNorm", "olmo2": "Olmo2RMSNorm",
}  # fmt: skip
"""Family -> the class of its QK-norm; step3p5 is the text part of step3p7."""


@pytest.mark.parametrize("family", NORMS)
def test_a_gain_is_what_the_norm_of_its_family_multiplies_by(family: str) -> None:
    """The norm's own code on vectors of length root d, against the gain that a scan folds into the weights."""
    package = "step3p7" if family == "step3p5" else family
    zoo.transformers()
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    norm = getattr(module, NORMS[family])(64)
    tensors = {"a.q_norm.weight": torch.randn(64)}
    with torch.no_grad():
        norm.weight.copy_(tensors["a.q_norm.weight"])
        response = norm(torch.ones(64))
    gain = Gain("a.q_norm.weight", facts_of("a", {"model_type": family}, None, None, None).gain_offset, False)
    torch.testing.assert_close(gain.of(tensors, 64).ravel(), response, rtol=1e-4, atol=1e-5)


# --- weights of no library --------------------------------------------------------------------------------------------

H, D, E = 4, 6, 24


def parts(kv: int = H) -> tuple[Tensor, Tensor, Tensor]:
    """`[H or kv, D, E]` each."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, D, E, generator=generator) for n in (H, kv, kv))  # type: ignore[return-value]


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in (q, k, v)])


def groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = torch.cat([q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]], 1)
    return grouped.flatten(0, 2)


def features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([q, k, v], 2).flatten(0, 2)


PACKED = [("blocks", H), ("blocks", 2), ("blocks", 1), ("groups", H), ("groups", 2), ("groups", 1), ("features", H)]


@pytest.mark.parametrize(("layout", "kv"), PACKED)
def test_layouts_are_read_as_they_are_said(layout: str, kv: int) -> None:
    """One weight of q, k and v, packed by hand, gives back its heads."""
    q, k, v = parts(kv)
    weight = {"blocks": blocks, "groups": groups, "features": features}[layout](q, k, v)
    tensors = {"net.3.attn.qkv.weight": weight}
    (found,) = place(entries(tensors), {}, heads=H, kv_heads=kv, layout=layout)
    assert isinstance(found, Placed)
    assert (found.layer, found.heads, found.kv_heads, found.head_dim) == ("net.3.attn", H, kv, D)
    assert torch.equal(found.q.of(tensors), q)
    assert torch.equal(found.k.of(tensors), k)


def test_features_side_by_side_are_of_one_head() -> None:
    weight = torch.zeros((H + 2 * 2) * D, E)
    (found,) = place(entries({"attn.qkv.weight": weight}), {}, heads=H, kv_heads=2, layout="features")
    assert isinstance(found, Unplaced)
    assert "for as many key heads as query heads" in found.note


def test_a_transposed_weight_is_told_by_its_shape() -> None:
    """`[in, 3 in]`, as Conv1D has it, where no config names the family."""
    q, k, v = parts()
    tensors = {"h.0.attn.c_attn.weight": blocks(q, k, v).t().contiguous()}
    (found,) = place(entries(tensors), {}, heads=H, layout="blocks")
    assert isinstance(found, Placed)
    assert torch.equal(found.k.of(tensors), k)


def test_torch_says_how_its_own_attention_is_packed() -> None:
    """`in_proj_weight` of torch.nn.MultiheadAttention needs no layout; separate ones of other widths neither."""
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 8, batch_first=True), 1, enable_nested_tensor=False)
    cross = nn.MultiheadAttention(E, H, kdim=10, vdim=10)
    tensors = {**layer.state_dict(), **{f"cross.{name}": x for name, x in cross.state_dict().items()}}
    first, second = place(entries(tensors), {}, heads=H)
    assert isinstance(first, Placed)
    assert isinstance(second, Placed)
    assert (first.layer, second.layer) == ("cross", "layers.0.self_attn")
    assert torch.equal(first.k.of(tensors), cross.k_proj_weight.detach().unflatten(0, (H, D)))
    packed = layer.layers[0].self_attn.in_proj_weight.detach()
    assert torch.equal(second.k.of(tensors), packed[E : 2 * E].unflatten(0, (H, D)))


@pytest.mark.parametrize(
    "pair",
    ["q_proj k_proj", "query key", "wq wk", "to_q to_k", "Wq Wk", "w_q w_k", "q_lin k_lin", "linear_q linear_k",
     "query_proj key_proj", "attn_q attn_k", "q k", "W_query W_key"],
)  # fmt: skip
def test_pairs_are_told_by_name(pair: str) -> None:
    q, k, _ = parts(2)
    names = [f"blocks.0.attention.{name}.weight" for name in pair.split()]
    tensors = {names[0]: q.flatten(0, 1), names[1]: k.flatten(0, 1)}
    (found,) = place(entries(tensors), {}, heads=H)
    assert isinstance(found, Placed)
    assert (found.q.name, found.k.name, found.kv_heads) == (*names, 2)
    assert torch.equal(found.k.of(tensors), k)


def test_two_streams_in_one_module_are_two_layers() -> None:
    """As of joint attention over text and image: each pair by itself, under names that differ."""
    names = ("to_q", "to_k", "add_q_proj", "add_k_proj")
    found = place({f"blocks.0.attn.{name}.weight": HALF for name in names}, {}, heads=H)
    assert [(x.layer, x.k.name) for x in found if isinstance(x, Placed)] == [
        ("blocks.0.attn", "blocks.0.attn.to_k.weight"),
        ("blocks.0.attn.add_q_proj", "blocks.0.attn.add_k_proj.weight"),
    ]


def entries(tensors: dict[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}


def _pair(rows_q: int = 24, rows_k: int = 24, **more: Entry) -> dict[str, Entry]:
    made = {f"l.attn.{side}_proj.weight": Entry((n, 24), "float16") for side, n in (("q", rows_q), ("k", rows_k))}
    return {**made, **{f"l.attn.{name.replace('__', '.')}": entry for name, entry in more.items()}}


HALF = Entry((24, 24), "float16")
UNSETTLED: dict[str, tuple[dict[str, Entry], dict[str, Any], str]] = {
    "heads unknown": (_pair(), {}, "give --heads"),
    "fused, no config": ({"attn.qkv.weight": Entry((72, 24), "float16")}, {"heads": 4}, "give --layout"),
    "fused, unknown family": (
        {"attn.qkv.weight": Entry((72, 24), "float16")},
        {"config": {"model_type": "codegen", "n_head": 4}},
        "model_type 'codegen' does not tell",
    ),
    "fused, key heads unknown": (
        {"attn.qkv.weight": Entry((48, 24), "float16")}, {"heads": 4, "layout": "blocks"}, "give --kv-heads",
    ),
    "heads that do not divide": (_pair(), {"heads": 5}, "check --heads"),
    "key heads against the rows": (_pair(), {"heads": 4, "kv_heads": 2}, "expected 2 key heads, found rows for 4 of 6"),
    "gated queries": (_pair(48), {"config": {"num_attention_heads": 4, "head_dim": 6}}, "more than queries in them"),
    "LoRA": (_pair(q_proj__lora_A__weight=HALF), {"heads": 4}, "a LoRA adapter on q_proj"),
    "LoRA alone": ({"b.q_proj.lora_A.weight": HALF, "b.q_proj.lora_B.weight": HALF}, {"heads": 4}, "merge it first"),
    "GPTQ": (
        {"a.q_proj.qweight": Entry((3, 24), "I32"), "a.k_proj.qweight": Entry((3, 24), "I32")}, {"heads": 4},
        "quantised (beside qweight)",
    ),
    "bitsandbytes": (
        {**_pair(q_proj__weight__absmax=Entry((9,), "float32")), "l.attn.q_proj.weight": Entry((288, 1), "U8")},
        {"heads": 4}, "quantised (beside weight.absmax)",
    ),
    "scaled float8": (
        _pair(q_proj__weight_scale_inv=Entry((1, 1), "float32")), {"heads": 4}, "quantised (beside weight_scale_inv)",
    ),
    "integers": ({**_pair(), "l.attn.q_proj.weight": Entry((24, 24), "I8")}, {"heads": 4}, "quantised (of I8)"),
    "three dimensions": ({**_pair(), "l.attn.q_proj.weight": Entry((4, 6, 24), "float16")}, {"heads": 4}, "a matrix"),
    "keys with values": (
        {"a.to_q.weight": HALF, "a.to_kv.weight": Entry((48, 24), "float16")}, {"heads": 4}, "(beside it: to_kv)",
    ),
    "cross-attention of GPT-2": (
        {"h.0.cross.c_attn.weight": Entry((24, 48), "float16"), "h.0.cross.q_attn.weight": HALF},
        {"config": {"model_type": "gpt2", "n_head": 4}}, "(beside it: c_attn)",
    ),
    "latent, no config": (
        {"a.q_proj.weight": HALF, "a.kv_a_proj_with_mqa.weight": HALF, "a.kv_b_proj.weight": HALF}, {"heads": 4},
        "latent attention (kv_a_proj_with_mqa, kv_b_proj)",
    ),
    "a norm without gains": (
        _pair(), {"config": {"num_attention_heads": 4, "use_qk_norm": True}}, "(use_qk_norm in config.json)",
    ),
    "norms by head": (
        _pair(q_norm__norms__0__weight=Entry((6,), "float16"), k_norm__norms__0__weight=Entry((6,), "float16")),
        {"heads": 4}, "expected a QK-norm with one gain a side",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSETTLED)
def test_what_is_not_settled_is_named(case: str) -> None:
    """No layout and no number of heads is guessed: the note says what is missing, and which option would do."""
    tensors, options, expected = UNSETTLED[case]
    (found,) = place(tensors, **{"config": {}, **options})
    assert isinstance(found, Unplaced), found
    assert expected in found.note


def test_what_is_no_attention_is_left_alone() -> None:
    """Embeddings of queries, receptance-and-key mixers, state spaces, optimizer states."""
    names = ("query_tokens", "blocks.0.att.key.weight", "mixer.in_proj.weight", "optimizer.exp_avg.l.q_proj.weight",
             "query_position_embeddings.weight", "linear_attn.in_proj_qkvz.weight", "norm.weight")  # fmt: skip
    assert place(dict.fromkeys(names, HALF), {}, heads=4) == []


def test_layers_come_in_their_order() -> None:
    names = ["h.10.attn", "h.2.attn", "h.1.attn"]
    assert sorted(names, key=natural) == ["h.1.attn", "h.2.attn", "h.10.attn"]


def test_a_merged_adapter_is_a_plain_model_again(tmp_path: Path) -> None:
    """What the note asks for works: PEFT's merge_and_unload."""
    peft = importlib.import_module("peft")
    model = zoo.build("Llama", "eager")
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    (tmp_path / "adapted").mkdir()
    save_file({name: x.contiguous() for name, x in tuned.state_dict().items()}, tmp_path / "adapted" / "a.safetensors")
    assert all("LoRA" in x.note for x in placed_in(tmp_path / "adapted", heads=4) if isinstance(x, Unplaced))
    tuned.save_pretrained(tmp_path / "adapter")
    assert all(isinstance(x, Unplaced) and "LoRA" in x.note for x in placed_in(tmp_path / "adapter", heads=4))
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert all(isinstance(x, Placed) for x in placed_in(tmp_path / "merged"))
