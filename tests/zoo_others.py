"""Tiny models of timm, x-transformers and PEFT, drawn like those of zoo.py."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from tests import zoo
from torch import Tensor, nn

X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "qk_norm": {"attn_qk_norm": True},
    "qk_norm, learned gain": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "rotary, grouped": {"rotary_pos_emb": True, "attn_kv_heads": 2},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "soft-clamped": {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 5.0},
}

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", {}),
    "ViT, q_norm and k_norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "Swin": ("swin_tiny_patch4_window7_224", {}),
    "XCiT": ("xcit_nano_12_p8_224", {}),
}
_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
_SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 5,
}


def x_transformer(name: str) -> nn.Module:
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **X_TRANSFORMERS[name])
    return zoo.drawn(library.TransformerWrapper(num_tokens=zoo.VOCABULARY, max_seq_len=32, attn_layers=layers))


def timm(name: str, fused: bool = True) -> nn.Module:
    """fused: by F.scaled_dot_product_attention, or by hand. Images are `[B, 3, 32, 32]`."""
    importlib.import_module("tests.vision")
    library = importlib.import_module("timm")
    model, options = TIMM[name]
    size = _SWIN if name == "Swin" else _VIT
    library.layers.set_fused_attn(fused, experimental=fused)
    try:
        made: nn.Module = library.create_model(model, **size, **options)
    finally:
        library.layers.set_fused_attn(True)
    return zoo.drawn(made)


def with_lora(model: nn.Module, *, dropout: float = 0.0, targets: tuple[str, ...] = ("q_proj", "k_proj")) -> Any:
    """A model with low-rank updates that are not zero, in training mode."""
    importlib.import_module("tests.vision")  # before transformers
    made = importlib.import_module("peft").get_peft_model(model, lora(dropout, targets))
    grow(made)
    made.requires_grad_()  # something is left to train when the updates are merged or disabled
    return made.train()


def lora(dropout: float = 0.0, targets: tuple[str, ...] = ("q_proj", "k_proj")) -> Any:
    config = importlib.import_module("peft").LoraConfig
    transposed = targets == ("c_attn",)
    return config(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=list(targets), fan_in_fan_out=transposed)


def grow(model: nn.Module, seed: int = 3) -> None:
    """PEFT starts its updates at zero: draw them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, zoo.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
