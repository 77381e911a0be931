"""What a model's config.json, or the user, says of the heads of a layer; and of families what their code says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUSED = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "phi3", "modernbert", "mpt"), "blocks"),
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "bloom", "falcon"), "groups"),
    **dict.fromkeys(("gpt_bigcode", "persimmon"), "groups"),
}
"""model_type -> the layout of its weight of q, k and v (placement.py); each is proved by a forward in the tests."""

CONV1D = frozenset(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"))
"""Whose fused weight is `[in, out]`."""

UNIT_GAIN = frozenset(
    {
        "gemma3", "gemma3_text", "qwen3_next", "t5gemma2", "t5gemma2_text", "t5gemma2_decoder", "step3p5", "step3p7",
        "minimax_m3_vl", "minimax_m3_vl_text",
    }
)  # fmt: skip
"""Whose norms multiply by 1 + the weight."""
GATED = frozenset(("qwen3_next",))
"""Whose projection of queries makes a gate of the same size beside each head."""

_PARTS = ("text", "vision", "audio", "encoder", "decoder")
_ALSO = {"vision": ("visual",), "backbone": ("pixel_level_module",)}
"""Part of a config -> how names of weights call it too."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_STACKS = ("encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "d_kv")
_WIDTHS = (
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "true_hidden_size", "attention_hidden_size",
)  # fmt: skip
_QK_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm", "qk_layernorms", "use_qk_layernorm")


class Unsettled(ValueError):  # noqa: N818 (the message is an answer, no failure)
    """What names, shapes and config do not tell; the message says what would."""


@dataclass(frozen=True)
class Facts:
    """What is known of a layer before its shapes are looked at; None where nothing is. heads_from, layout_from: who
    says so. layout: the user's. widths: how many features the config says that all query heads together have. latent:
    features of a head without position, with it, and of its value. normed: the key of the config that asks for a
    QK-norm, "" for none."""

    model_type: str
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    layout: str | None
    heads_from: str
    scale: float | None
    widths: tuple[int, ...] = ()
    latent: tuple[int, int, int] | None = None
    normed: str = ""

    @property
    def layout_from(self) -> str:
        return "--layout" if self.layout else f"model_type {self.model_type}"

    @property
    def gain_offset(self) -> float:
        return 1.0 if self.model_type in UNIT_GAIN else 0.0

    def of_separate(self, out_q: int, out_k: int) -> tuple[int, int, int]:
        """Query heads, key heads and head width of weights with so many rows. Raises Unsettled."""
        if self.heads is None and self.head_dim and out_q % self.head_dim == 0:
            heads = out_q // self.head_dim
        else:
            heads = self._known_heads()
        d, rest = divmod(out_q, heads)
        if rest or d == 0 or out_k % d:
            raise Unsettled(f"{out_q} and {out_k} rows are not {heads} heads and their keys; check --heads")
        if self.head_dim not in (None, d):
            raise Unsettled(f"expected heads of {self.head_dim} features, found {d}: more than queries in them")
        self._check_width(out_q)
        kv_heads = out_k // d
        if heads % kv_heads or (self.kv_heads is not None and self.kv_heads != kv_heads):
            expected = f"{self.kv_heads} key heads" if self.kv_heads else "key heads that divide the query heads"
            raise Unsettled(f"expected {expected}, found rows for {kv_heads} of {d}; check --heads, --kv-heads")
        return heads, kv_heads, d

    def of_fused(self, leaf: str, shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
        """Query heads, key heads, head width, and whether the weight is `[in, out]`. Raises Unsettled."""
        heads = self._known_heads()
        transposed = self.model_type in CONV1D or (not self.model_type and shape[1] == 3 * shape[0])
        out = shape[1] if transposed else shape[0]
        kv_heads = self.kv_heads
        if leaf == "in_proj_weight" and out == 3 * shape[1]:
            kv_heads = heads  # torch's own attention shares no keys
        if kv_heads is None and self.head_dim and out % self.head_dim == 0:
            kv_heads = (out // self.head_dim - heads) // 2
        if kv_heads is None:
            if not self.model_type and 3 * min(shape) != out:
                raise Unsettled(f"{leaf} of shape {list(shape)}: how many key heads is not known; give --kv-heads")
            kv_heads = heads
        d, rest = divmod(out, heads + 2 * kv_heads)
        if rest or kv_heads < 1 or heads % kv_heads:
            raise Unsettled(
                f"{leaf}: {out} rows are not those of {heads} queries, {kv_heads} keys and values; "
                "check --heads, --kv-heads"
            )
        self._check_width(heads * d)
        return heads, kv_heads, d, transposed

    def _check_width(self, rows: int) -> None:
        """Heads of a config are those of its attention as wide as the model: a part of it that is not may have others,
        as the backbone of a segmenter or the narrowed attention of ConvBERT. Raises Unsettled."""
        if self.heads_from == "config.json" and self.head_dim is None and self.widths and rows not in self.widths:
            expected = " or ".join(map(str, self.widths))
            raise Unsettled(
                f"expected queries of {expected} features in the {self.heads} heads of config.json, found {rows}; "
                "give --heads"
            )

    def _known_heads(self) -> int:
        if self.heads is None:
            raise Unsettled(
                "how many heads is not known (no config.json, or it does not say); give --heads, and --kv-heads where "
                "they are fewer"
            )
        return self.heads


def facts_of(
    layer: str, config: Mapping[str, Any], heads: int | None, kv_heads: int | None, layout: str | None
) -> Facts:
    """Of a layer with this name; of a model of several parts (text_config, vision_config), of the part in the name."""
    section = _section(layer.lower(), config)
    model_type = str(section.get("model_type") or config.get("model_type") or "")
    stack = "decoder" if "decoder" in layer else "encoder"
    sizes = [_number(section, (f"{key}_head_dim",)) for key in ("qk_nope", "qk_rope", "v")]
    found = _number(section, (f"{stack}_attention_heads", *_HEADS))
    scale = section.get("query_pre_attn_scalar")
    return Facts(
        model_type,
        heads or found,
        kv_heads or _kv_heads(model_type, section, found),
        _number(section, _HEAD_DIM),
        layout,
        "--heads" if heads else "config.json",
        float(scale) ** -0.5 if isinstance(scale, int | float) and scale > 0 else None,
        tuple(sorted({width for key in _WIDTHS if (width := _number(section, (key,)))})),
        (sizes[0], sizes[1], sizes[2]) if sizes[0] and sizes[1] and sizes[2] else None,
        next((key for key in _QK_NORM if section.get(key) is True), ""),
    )


def _section(layer: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that a layer belongs to: the first that its name speaks of, else the whole where that has
    heads, else the text. Parts may have parts."""
    while True:
        parts = {
            name: part
            for key, part in config.items()
            if isinstance(part, Mapping) and ((name := key.removesuffix("_config")) in _PARTS or part.get("model_type"))
        }
        spoken = {name: "|".join(map(re.escape, (name, *_ALSO.get(name, ())))) for name in parts}
        found = [
            (at.start(), -len(name), name)
            for name in parts
            if (at := re.search(rf"(?<![^.])(?:{spoken[name]})(?![^._])", layer))
        ]
        if found:
            config = parts[min(found)[2]]
        elif not parts or (_number(config, (*_STACKS, *_HEADS)) and _number(config, _WIDTHS)):
            return config
        else:  # heads of no width may be those of any part
            config = parts.get("text", {})


def _kv_heads(model_type: str, section: Mapping[str, Any], heads: int | None) -> int | None:
    if model_type in ("falcon", "gpt_bigcode") and not section.get("new_decoder_architecture"):
        return 1 if section.get("multi_query", True) else heads
    return _number(section, _KV_HEADS)


def _number(section: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first that is a whole number: lists differ from layer to layer, and say nothing here."""
    found = (section.get(key) for key in keys)
    return next((value for value in found if type(value) is int and value > 0), None)
