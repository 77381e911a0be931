"""Heads of saved weights: of the part of the config that a layer belongs to, and of no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import zoo

from attnwatch.hooks.checkpoints import open_checkpoint
from attnwatch.hooks.placement import Placed, Unplaced, place
from attnwatch.hooks.weight_files import Entry

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)

HALF = Entry((24, 24), "float16")


def pair(layer: str) -> dict[str, Entry]:
    return {f"{layer}.{side}_proj.weight": HALF for side in "qk"}


def _placed_in(folder: Path) -> list[Placed | Unplaced]:
    checkpoint = open_checkpoint(folder)
    return place(checkpoint.tensors, checkpoint.config)


def test_a_part_of_a_model_has_the_heads_of_its_own_config() -> None:
    """A model of text and images: each tower by its part of the config."""
    tensors = {}
    for tower in ("vision_tower", "language_model"):
        tensors |= {f"{tower}.layers.0.attn.{side}_proj.weight": HALF for side in "qk"}
    config = {"text_config": {"num_attention_heads": 4}, "vision_config": {"num_attention_heads": 8}}
    assert {x.layer.split(".")[0]: x.heads for x in place(tensors, config) if isinstance(x, Placed)} == {
        "vision_tower": 8,
        "language_model": 4,
    }


PARTED = {
    "text_config": {"num_attention_heads": 4, "hidden_size": 24},
    "vision_config": {"num_attention_heads": 8, "hidden_size": 24},
    "qformer_config": {"model_type": "a_qformer", "num_attention_heads": 2, "hidden_size": 24},
    "decoder": {"model_type": "a_decoder", "num_attention_heads": 1, "hidden_size": 24},
}


@pytest.mark.parametrize(
    ("layer", "heads"),
    [
        ("qformer.encoder.layer.0.attention", 2),
        ("visual.blocks.0.attn", 8),
        ("decoder.layers.0.encoder_attn", 1),
        ("decoder.layers.0.encoder_attn_text", 1),
        ("language_model.layers.0.self_attn", 4),
    ],
)
def test_a_part_is_the_one_that_a_name_speaks_of_first(layer: str, heads: int) -> None:
    (found,) = place(pair(layer), PARTED)
    assert isinstance(found, Placed)
    assert found.heads == heads


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"num_attention_heads": 4, "hidden_size": 48}, "expected queries of 48 features in the 4 heads"),
        ({"num_attention_heads": 4, "backbone_config": {"model_type": "swin"}}, "how many heads is not known"),
    ],
)
def test_heads_of_a_config_are_not_those_of_attention_of_another_width(config: dict[str, Any], note: str) -> None:
    """ConvBERT's attention is half as wide as its config says, a segmenter's backbone has heads of its own."""
    (found,) = place(pair("l.attn"), config)
    assert isinstance(found, Unplaced)
    assert note in found.note
    (found,) = place(pair("l.attn"), config, heads=2)  # as the note asks for
    assert isinstance(found, Placed)


def test_a_model_around_its_text_part_has_heads_of_its_own() -> None:
    """A detector that is told in words what to look for: its own stacks are not its text part's."""
    config = {"encoder_attention_heads": 8, "decoder_attention_heads": 4, "d_model": 24, **PARTED}
    del config["decoder"]
    (found,) = place(pair("decoder.layers.0.encoder_attn_text"), config)
    assert isinstance(found, Placed)
    assert found.heads == 4


def test_torchs_own_attention_shares_no_keys() -> None:
    """Whatever the config says of the others."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24}
    (found,) = place({"head.attention.in_proj_weight": Entry((72, 24), "float16")}, config)
    assert isinstance(found, Placed)
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 4, 6)


def test_models_of_parts_and_narrowed_attention_are_never_read_wrong(tmp_path: Path) -> None:
    """What is placed of them has the heads that their modules say."""
    library = zoo.transformers()
    small = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    swin = library.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2, image_size=16, patch_size=2)
    masks = {"backbone_config": swin, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32}
    models = {
        "convbert": library.ConvBertModel(library.ConvBertConfig(**small, num_attention_heads=4, embedding_size=32)),
        "mask2former": library.Mask2FormerModel(
            library.Mask2FormerConfig(
                **masks, num_attention_heads=8, encoder_layers=1, decoder_layers=2, dim_feedforward=32,
                encoder_feedforward_dim=32, feature_strides=[2, 4],
            )
        ),
    }  # fmt: skip
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        found = _placed_in(tmp_path / name)
        assert found
        modules = dict(model.named_modules())
        for layer in found:
            if isinstance(layer, Placed):
                said = [getattr(modules[layer.layer], n, None) for n in ("num_heads", "num_attention_heads")]
                assert layer.heads in said, layer


def test_a_model_and_its_average_under_the_name_of_a_wrapper_are_two() -> None:
    """As `model.state_dict() | averaged.state_dict()` of torch.optim.swa_utils.AveragedModel; alone it is a wrapper."""
    names = [f"layers.{n}.attn.{side}_proj.weight" for n in range(2) for side in "qk"]
    averaged = {f"module.{name}": Entry((24, 24), "float32") for name in names}
    model = {name: Entry((24, 24), "float32") for name in names}
    both = [each.layer for each in place(model | averaged, {}, heads=4)]
    assert both == ["layers.0.attn", "layers.1.attn", "module.layers.0.attn", "module.layers.1.attn"]
    assert [each.layer for each in place(averaged, {}, heads=4)] == ["layers.0.attn", "layers.1.attn"]
