"""Tiny models of the families of Hugging Face transformers, from configs: no weights are fetched.

All weights are drawn anew, gains and biases too: attention is then neither uniform nor saturated, and no layout is
right by a tie.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 64, 2, 12
NOISE = (
    "ignore:flex_attention called without torch.compile",
    "ignore:_compile flag on create_block_mask",
    "ignore:`torch.jit.script",
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:`past_key_values` is deprecated",
)
"""Warnings that these libraries give in any case."""

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2")


class Family(NamedTuple):
    """kind of inputs: "text", "pairs" (text to text), "image" or "sound"."""

    config: str
    model: str
    options: dict[str, Any]
    kind: str = "text"


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {
    **_TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_TURNS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
_TWO_STACKS = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "decoder_start_token_id": 1,
}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}

FAMILIES = {
    "Llama": Family("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "Mistral": Family("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "Phi-3": Family("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "Qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "Qwen3-Next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_GROUPED,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Gemma 2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_GROUPED, **_TURNS, "head_dim": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, **_TURNS, "head_dim": 8, "query_pre_attn_scalar": 16}
    ),
    "OLMo 2": Family("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "GPT-2": Family("GPT2Config", "GPT2LMHeadModel", {**_TOKENS, **_GPT2}),
    "GPT-2 (upcast)": Family("GPT2Config", "GPT2LMHeadModel", {**_TOKENS, **_GPT2, "reorder_and_upcast_attn": True}),
    "GPT-NeoX": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_TEXT, "attention_dropout": 0.0}),
    "GPT-Neo": Family(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            **_TOKENS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
            "attention_dropout": 0.0,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
        },
    ),
    "Falcon": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {
            **_TOKENS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
    ),
    "BLOOM": Family("BloomConfig", "BloomForCausalLM", {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "BERT": Family("BertConfig", "BertForMaskedLM", {**_TEXT, **_NO_DROPOUT}),
    "RoBERTa": Family("RobertaConfig", "RobertaForMaskedLM", {**_TEXT, **_NO_DROPOUT, "max_position_embeddings": 70}),
    "ModernBERT": Family(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**_TEXT, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "DeBERTa-v2": Family(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {
            **_TEXT,
            **_NO_DROPOUT,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
        },
    ),
    "ViT": Family("ViTConfig", "ViTForImageClassification", {**_IMAGE, **_NO_DROPOUT}, "image"),
    "CLIP": Family("CLIPVisionConfig", "CLIPVisionModel", {**_IMAGE, "projection_dim": 16}, "image"),
    "T5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **_TOKENS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "pairs",
    ),
    "BART": Family(
        "BartConfig", "BartForConditionalGeneration", {**_TWO_STACKS, "max_position_embeddings": 64}, "pairs"
    ),
    "Whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        "sound",
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_TEXT,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_GROUPED,
            **_TURNS,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_dropout": 0.0,
        },
    ),
}


def transformers() -> Any:
    """The library, quiet."""
    importlib.import_module("tests.vision")
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    return library


class NotOffered(Exception):  # noqa: N818 (no error: the library has no such implementation of the family)
    """The library refuses this implementation for the family; the message is its own."""


def build(name: str, implementation: str = "sdpa", **options: Any) -> Any:
    """A model in training mode. options: more of the config. flash_attention_2 is there within `flash_kernels()`.

    Raises NotOffered."""
    library = transformers()
    family = FAMILIES[name]
    config = getattr(library, family.config)(**family.options, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = getattr(library, family.model)._from_config(config, attn_implementation=implementation)
        except ValueError as error:
            raise NotOffered(str(error)) from error
    if name.startswith("GPT-2") and implementation == "flash_attention_2":
        model.double()  # for float32 the library looks for an nn.Linear to tell what to cast to, and GPT-2 has none
    return drawn(model)


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter drawn anew: matrices keep the size of activations, gains and biases lie around their values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.2 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * noise)
    return model.train()


def inputs(name: str) -> dict[str, Tensor]:
    """One batch for a family, labels included."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    kind = FAMILIES[name].kind
    if kind == "image":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}
    if kind == "sound":
        return {"input_features": torch.randn(BATCH, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids[:, :7].contiguous() if kind == "pairs" else ids}
