"""Every family of models and every implementation of its attention: layers are verified, and entropy and sink mass are
those of the maps that the model itself returns. docs/families.md says the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks import families
from tests import zoo
from tests.returned_maps import of_maps

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)

NOT_OFFERED = {
    "GPT-2": {"flex_attention"},
    "GPT-2 (upcast)": {"flex_attention"},
    "Gemma 2": {"sdpa"},
    "GPT-Neo": {"sdpa", "flex_attention"},
    "Falcon": {"flex_attention"},
    "BLOOM": {"sdpa", "flex_attention", "flash_attention_2"},
    "DeBERTa-v2": {"sdpa", "flex_attention", "flash_attention_2"},
    "T5": {"flash_attention_2"},
    "Qwen3-Next": {"flex_attention"},
    "gpt-oss": {"sdpa"},
}
"""By the library, which says so when such a model is built."""

NOT_ON_CPUS = {("T5", "flex_attention"), ("gpt-oss", "flex_attention")}
OTHER_MAPS = {("GPT-Neo", "flash_attention_2")}
"""The library gives the kernel no local window: this model attends otherwise than its eager twin."""

OTHERS = {
    "timm XCiT, fused": "verified, uncovered: attends over channels, not over positions",
    "timm XCiT, by hand": "verified, uncovered: attends over channels, not over positions",
    "x-transformers, qk_norm, learned gain": "logits_only: no projection and layout makes q",
    "linear attention": "uncovered: looks like attention, but no call was seen in it",
    "sigmoid attention": "uncovered: looks like attention, but no call was seen in it",
    "by exponentials attention": "uncovered: looks like attention, but no call was seen in it",
}
"""What is not simply "verified"."""


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_layers_are_verified_and_their_numbers_are_those_of_the_models_own_maps(name: str) -> None:
    results = families.family(name)
    assert set(results) == set(zoo.IMPLEMENTATIONS)
    for implementation, result in results.items():
        if implementation in NOT_OFFERED.get(name, ()):
            assert result == "not offered"
        elif (name, implementation) in NOT_ON_CPUS:
            assert str(result).startswith("does not run on CPUs")
        else:
            assert isinstance(result, families.Result), (implementation, result)
            assert {state for state, _ in result.states} == {"verified"}, (implementation, result.states)
            assert (result.error < families.CLOSE) != ((name, implementation) in OTHER_MAPS), (implementation, result)


@pytest.mark.parametrize("name", [name for name, _, _ in families.others()])
def test_models_of_other_libraries_and_of_our_own(name: str) -> None:
    assert str(families.other(name)) == OTHERS.get(name, "verified")


def test_the_page_says_what_is_so() -> None:
    """After a change: `python benchmarks/families.py --write`."""
    page = families.PAGE.read_text(encoding="utf-8")
    assert families.filled(page) == page
    assert "| Llama | verified |" in page


def test_a_number_that_is_off_is_not_called_verified() -> None:
    assert str(families.Result((("verified", ""),), 1e-4)) == "verified, other maps"
    assert str(families.Result((("verified", ""),), math.nan)) == "verified, other maps"
    mixed = (("verified", ""), ("uncovered", "why (1e-3); more"))
    assert str(families.Result(mixed, 0.0)) == "verified, uncovered: why"


def test_a_layer_without_numbers_is_off() -> None:
    """A map of a layer that gave nothing compares as NaN, and NaN is not close."""
    maps = torch.full((1, 4, 3, 3), 1 / 3)
    reading = families.watched(zoo.build("Llama"), **zoo.inputs("Llama"))
    reading.values[:] = np.nan
    result = families.result(reading, {reading.measured[0]: maps})
    assert not result.error < families.CLOSE


def test_what_maps_say() -> None:
    """Two keys halved, four quartered, and a row of one key that carries nothing; the last row drops a half."""
    rows = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0, 0, 0]]
    entropy, sink = of_maps(torch.tensor([[rows[:3]]]))
    np.testing.assert_allclose(entropy, [(math.log(2) + math.log(4)) / 2])
    np.testing.assert_allclose(sink, [0.375])  # the first two keys: (0.5 + 0.25) / 2
    entropy, sink = of_maps(torch.tensor([[[*rows[2:3], [0.125] * 4]]]))
    half = 0.5 * math.log(2) + 4 * 0.125 * math.log(8)
    np.testing.assert_allclose(entropy, [(math.log(4) + half) / 2])
    np.testing.assert_allclose(sink, [0.25])  # dropped on average: (0 + 0.5) / 2
