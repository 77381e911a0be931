"""What a row sees: padding on either side, packed sequences, masks of the user's own, windows; for every
implementation, flash kernels included, which get no mask at all."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.families import watched
from tests import zoo
from tests.flash import flash_kernels
from tests.models import layer_of, values_of
from tests.returned_maps import of_maps, returned
from torch import Tensor, nn

from attnwatch.hooks.probe import Reading
from attnwatch.hooks.statistics import ATTENTION

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)

LEFT = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
RIGHT = torch.tensor([[1] * 7 + [0] * 5, [1] * 11 + [0]])  # leaves rows of a window of 4 without a key
SHORT = torch.tensor([[1] * 9 + [0] * 3, [1] * 11 + [0]])
STARTS = torch.tensor([[*range(5), *range(4), *range(3)]])
"""Positions of three sequences in one."""


def run(name: str, implementation: str, batch: dict[str, Any]) -> tuple[nn.Module, Reading]:
    with flash_kernels():
        model = zoo.build(name, implementation)
        reading = watched(model, **batch, backward=implementation != "flex_attention")
    return model, reading


def assert_maps(reading: Reading, maps: dict[str, Tensor]) -> None:
    """Every layer is verified, and its entropy and sink mass are those of the maps."""
    assert {layer.state for layer in reading.layers} == {"verified"}, reading.layers
    assert set(maps) == set(reading.measured)
    for name, layer_maps in maps.items():
        entropy, sink = of_maps(layer_maps)
        values = values_of(reading, name)
        np.testing.assert_allclose(values["entropy"], entropy, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(values["sink_mass"], sink, atol=1e-5, err_msg=name)


def own_maps(name: str, batch: dict[str, Any], reading: Reading) -> dict[str, Tensor]:
    return returned(zoo.build(name, "eager"), batch, reading.measured)


def without(maps: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Rows `[B | 1, H | 1, T]` that take no part."""
    return {name: p * ~rows[..., None] for name, p in maps.items()}


def sighted(maps: dict[str, Tensor], padding: Tensor) -> dict[str, Tensor]:
    """Without rows that see nothing: eager code spreads them evenly, also over padding, which no other row does."""
    return {name: p * ~(p * (padding == 0)[:, None, None]).any(-1, keepdim=True) for name, p in maps.items()}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *product(("Llama", "Mistral", "BERT"), zoo.IMPLEMENTATIONS),
        ("Gemma 2", "eager"),
        ("Gemma 2", "flash_attention_2"),
    ],
)
@pytest.mark.parametrize("padding", [LEFT, RIGHT, SHORT], ids=["left", "right", "short"])
def test_padding(name: str, implementation: str, padding: Tensor) -> None:
    """Keys that are padding are seen by none; rows that see nothing are dropped. Flash kernels leave out the queries
    that are padding too."""
    batch = {**zoo.inputs(name), "attention_mask": padding}
    _, reading = run(name, implementation, batch)
    maps = sighted(own_maps(name, batch, reading), padding)
    flash = implementation == "flash_attention_2"
    assert_maps(reading, without(maps, (padding == 0)[:, None]) if flash else maps)


def packed(name: str) -> dict[str, Any]:
    """With a cache (the default) the library would not take the positions for packing."""
    return {key: value[:1] for key, value in zoo.inputs(name).items()} | {"position_ids": STARTS, "use_cache": False}


@pytest.mark.parametrize("implementation", zoo.IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences(name: str, implementation: str) -> None:
    """Told apart by positions that start anew. Where no mask shows it, the layer says so."""
    batch = packed(name)
    _, reading = run(name, implementation, batch)
    document = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    maps = own_maps(name, batch, reading)
    for p in maps.values():  # the model's own maps are blocks indeed
        assert p[:, :, document[:, None] != document].abs().max() == 0
    assert_maps(reading, maps)
    said = ["packed sequences told apart by position_ids" in layer.note for layer in reading.layers]
    assert said == [implementation == "flash_attention_2"] * 2


def test_positions_of_one_sequence_are_no_packing() -> None:
    """Also when they do not start at 0, as RoBERTa's."""
    for name in ("Llama", "RoBERTa"):
        batch = {key: value[:1] for key, value in zoo.inputs(name).items()}
        _, reading = run(name, "flash_attention_2", batch)
        assert_maps(reading, own_maps(name, batch, reading))
        assert not any("packed" in layer.note for layer in reading.layers)


def test_packed_sequences_told_by_their_ends() -> None:
    """`cu_seq_lens_q` and `_k`, as a collator without padding passes them, with a window on top (Mistral)."""
    for name in ("Llama", "Mistral"):
        ends = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
        _, reading = run(name, "flash_attention_2", packed(name) | lengths)
        assert_maps(reading, own_maps(name, packed(name), reading))
        assert all("packed sequences told apart by cu_seq_lens" in layer.note for layer in reading.layers)


@pytest.mark.parametrize(
    ("implementation", "kind"), [("eager", torch.float32), ("sdpa", torch.float32), ("sdpa", torch.bool)]
)
def test_a_prefix_that_all_rows_see(implementation: str, kind: torch.dtype) -> None:
    """A mask `[B, 1, T, T]` of the user's own: the first four keys and those before, True or 0."""
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    causal[:, :4] = True
    mask = causal.expand(2, 1, -1, -1)
    if kind == torch.float32:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    batch = {**zoo.inputs("Llama"), "attention_mask": mask}
    _, reading = run("Llama", implementation, batch)
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~causal, torch.finfo(torch.float32).min)
    maps = own_maps("Llama", {**batch, "attention_mask": additive}, reading)
    assert all((p[:, :, 0, :4] > 0).all() and p[:, :, 0, 4:].abs().max() == 0 for p in maps.values())
    assert_maps(reading, maps)


def test_keys_of_a_trained_prefix() -> None:
    """PEFT's prefix tuning puts four keys, made by no projection, before the first: only the logits are known."""
    import peft

    batch = zoo.inputs("Llama")
    readings = []
    for implementation in ("eager", "sdpa", "flash_attention_2"):
        with flash_kernels():
            config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
            model = zoo.drawn(peft.get_peft_model(zoo.build("Llama", implementation), config))
            readings.append(watched(model, **batch))
        assert [layer.state for layer in readings[-1].layers] == ["logits_only"] * 2
        assert all("output made again" in layer.note for layer in readings[-1].layers)
    metrics = slice(0, len(ATTENTION))
    for reading in readings[1:]:
        np.testing.assert_allclose(reading.values[metrics], readings[0].values[metrics], rtol=1e-4, atol=1e-5)


def test_the_call_decides_and_not_the_config() -> None:
    """Gemma 3's config has a soft-cap that its attention never passes on."""
    model = zoo.build("Gemma 3", "eager", attn_logit_softcapping=0.5)
    batch = zoo.inputs("Gemma 3")
    reading = watched(model, **batch)
    assert_maps(reading, returned(model, batch, reading.measured))


def test_a_learned_sink_takes_its_part() -> None:
    """gpt-oss: rows sum to less than 1; raised sinks take the most."""
    model = zoo.build("gpt-oss", "eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(3.0)
    batch = zoo.inputs("gpt-oss")
    reading = watched(model, **batch)
    maps = returned(model, batch, reading.measured)
    assert all(p.sum(-1).mean() < 0.8 for p in maps.values())
    assert_maps(reading, maps)
    assert values_of(reading, "model.layers.1.self_attn")["sink_mass"].min() > 0.3


@pytest.mark.parametrize("honest", [True, False])
def test_an_attention_function_of_the_users_own(honest: bool) -> None:
    """Registered with the library under its own name. One that does not do what it was asked is not believed."""
    from transformers import AttentionInterface

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = query @ key.mT * options["scaling"]
        if honest:
            scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("own", attend)
    try:
        model, batch = zoo.build("Llama", "own"), zoo.inputs("Llama")
        reading = watched(model, **batch)
    finally:
        del AttentionInterface._global_mapping["own"]
    if honest:
        assert_maps(reading, own_maps("Llama", batch, reading))
    else:
        layer = layer_of(reading, "model.layers.0.self_attn")
        assert layer.state == "uncovered"
        assert "could not be made again" in layer.note
        assert np.isnan(reading.values).all()
