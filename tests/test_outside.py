"""Runs of models that the benchmark does not have."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.detection.data import IGNORED, MASK, SOURCES, Batch
from benchmarks.detection.held_out import HELD_OUT
from benchmarks.detection.outside import HOT, USUAL, behind, build, cosine, image
from benchmarks.detection.recipes import RECIPES
from benchmarks.detection.train import train

from attnwatch import open_run

NAMED = {recipe.name: recipe for recipe in (*USUAL, *HOT)}


@pytest.mark.parametrize(("name", "layers"), [("t5", 12), ("llama_tied_bf16", 4), ("encoder", 4)])
def test_they_train_and_every_layer_is_verified(name: str, layers: int, tmp_path: Path) -> None:
    """From about the loss of a guess among 256 bytes downwards; T5 has a self- and a cross-attention in its decoder."""
    train(replace(NAMED[name], steps=12, rate=((0, 1e-3),)), tmp_path / "run", build)
    run = open_run(tmp_path / "run")
    losses = run.scalar("loss")[1]
    assert losses[0] == pytest.approx(log(256), abs=0.7)
    assert losses[-1] < losses[0] - 0.3
    assert [layer.state for layer in run.coverage] == ["verified"] * layers


def test_no_name_is_given_twice() -> None:
    every = (*RECIPES, *HELD_OUT, *USUAL, *HOT)
    assert len({recipe.name for recipe in every}) == len(every)
    assert {recipe.reference for recipe in HOT} <= {recipe.name for recipe in USUAL}


def test_a_cosine_by_hand() -> None:
    """Warm-up to 1 in 50 steps; then down to a tenth at the end, half-way at 0.55."""
    knots = dict(cosine(1.0, 450))
    assert knots[0] == 1 / 50
    assert (knots[50], knots[250], knots[450]) == pytest.approx((1.0, 0.55, 0.1))


def test_behind_for_good() -> None:
    """Even for 100 steps, then worse by 1.1: the mean of 50 is 0.1 above with the fifth. A hundred steps like the usual
    one's after that, and it was never behind for good; nor does what follows a loss that is no number count."""
    usual = np.full(300, 2.0)
    worse = np.where(np.arange(300) < 100, 2.0, 3.1)
    assert behind(worse, usual) == 104
    assert behind(np.where(np.arange(300) < 200, worse, 2.0), usual) is None
    assert behind(np.where(np.arange(300) < 200, worse, np.nan), usual) == 104
    assert behind(worse + 1, usual) == 49
    assert behind(usual, usual) is None


def drawn(source: str) -> Batch:
    return SOURCES[source](64, 32, 0, torch.Generator().manual_seed(3))


def test_masked_bytes_are_asked_for_and_hidden() -> None:
    """About a seventh of what is no padding; at least half of every sequence is kept."""
    inputs, targets, padding = drawn("masked")
    assert padding is not None
    asked = targets != IGNORED
    assert torch.equal(asked, inputs == MASK)
    assert not (asked & padding).any()
    assert (inputs[padding] == 0).all()
    assert (padding.sum(1) <= 16).all()
    assert asked.sum().item() / (~padding).sum().item() == pytest.approx(1 / 7, abs=0.03)


def test_the_second_half_is_asked_for() -> None:
    inputs, targets, _ = drawn("continued")
    assert (targets[:, :16] == IGNORED).all()
    assert torch.equal(targets[:, 16:-1], inputs[:, 17:])


def test_pixels_of_an_image_stand_where_they_stood() -> None:
    """Patches put together again are an image of scikit-learn's, with its class."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    patches, targets, _ = drawn("digits_4")
    found = load_digits()
    for whole, target in zip(image(patches), targets, strict=True):
        pixels = (whole[0].numpy() + 1) * 8
        assert target in found.target[(found.images == pixels).all(axis=(1, 2))]
