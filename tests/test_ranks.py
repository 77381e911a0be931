"""Ranks that train together are recorded as one process would be, and train as if nobody watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.gang import gang, nodes
from tests.ranks_decoder import HEADS, WATCH, decoder, train
from tests.ranks_worker import RANKS

import attnwatch
from attnwatch.hooks.layers import METRICS
from attnwatch.monitor.run import Run

EXACT, MEANS = ("max", "min", "sum"), 1e-6
SHARDED = {"update_ratio", "update_rank"}
"""Of weights that are sharded after the step: not measured."""

SPLIT = {name for name in RANKS if "parallel" in name}
PARTED = {"layer_energy_top10", "layer_directions_90"}
"""Of all heads of a layer together, which no rank has."""


STAGES = {
    "pipeline_interleaved": ("0.blocks.0", "0.blocks.1", "1.blocks.2", "1.blocks.3"),
    "pipeline_in_v": ("0.blocks.0", "0.blocks.1", "1.blocks.2", "1.blocks.3"),
}
"""Blocks of a model of four: the first and the second stage of each rank."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, in every way but two; and two nodes of two."""
    place = tmp_path_factory.mktemp("ranks")
    gang("ranks_worker.py", 2, str(place))
    nodes("ranks_worker.py", 2, 2, str(place))
    return place


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The same training by one process, on the whole batch."""

    @cache
    def trained(blocks: int = 2, dtype: torch.dtype = torch.float32) -> Run:
        place = tmp_path_factory.mktemp("alone") / "run"
        model = decoder(blocks).to(dtype)
        train(model, slice(None), lambda model: attnwatch.watch(model, run=place, **WATCH))
        return attnwatch.open_run(place)

    return trained


def left(trained: Path, way: str) -> list[dict[str, Any]]:
    """What each rank left."""
    return [torch.load(trained / f"{way}-{rank}.pt", weights_only=False) for rank in range(RANKS[way])]


def layers(way: str) -> tuple[str, ...]:
    return tuple(f"{block}.attention" for block in STAGES.get(way, ("blocks.0", "blocks.1")))


ALL = list(RANKS)


@pytest.mark.parametrize("way", ALL)
def test_training_is_the_same_bit_by_bit(way: str, trained: Path) -> None:
    """Losses and weights of every rank, sampled at every other step; every layer was seen, and nothing went wrong."""
    for rank in left(trained, way):
        assert rank["same"]
        assert rank["problems"] == []
        assert rank["coverage"] == [(layer, "verified", HEADS) for layer in layers(way)]
        assert rank["run"] == str(trained / way)


@pytest.mark.parametrize("way", ALL)
def test_every_rank_ends_with_the_same_sample(way: str, trained: Path) -> None:
    first, *others = (rank["values"] for rank in left(trained, way))
    assert all(np.array_equal(first, other, equal_nan=True) for other in others)


@pytest.mark.parametrize("way", [way for way in ALL if way != "fsdp_bfloat16"])
def test_the_merged_sample_is_that_of_one_process(way: str, trained: Path, alone: Callable[..., Run]) -> None:
    """On the same global batch: largest values exactly, means to 1e-6. Split heads multiply smaller matrices, which
    round otherwise; so do gradients that are added up by ranks, so that later steps are near and not the same."""
    run, expected = attnwatch.open_run(trained / way), alone(len(layers(way)))
    split = way in SPLIT
    unknown = (SHARDED if "fsdp" in way or way == "ddp_over_tensor_parallel" else set()) | (PARTED if split else set())
    assert run.layers == layers(way)
    assert run.steps.tolist() == expected.steps.tolist() == [0, 2]
    for metric in METRICS:
        found, real = run.metric(metric.name), expected.metric(metric.name)
        if metric.name in unknown:
            assert np.isnan(found).all(), metric.name
            continue
        assert (np.isnan(found) == np.isnan(real)).all(), metric.name
        exact = metric.merge in EXACT and not split
        assert apart(found[0], real[0]) <= (0 if exact else MEANS), metric.name
        assert apart(found[1], real[1]) <= 1e-5, metric.name


def apart(found: NDArray[np.float32], real: NDArray[np.float32]) -> float:
    """Largest relative difference."""
    off = np.abs(found.astype(float) - real) / np.maximum(np.abs(real), 1e-6)
    return 0.0 if np.isnan(off).all() else float(np.nanmax(off))


def test_mixed_precision_is_measured_as_it_is_computed(trained: Path, alone: Callable[..., Run]) -> None:
    """Fully sharded, parameters cast to bfloat16 for the forward: as a bfloat16 model, weights too."""
    run, expected = attnwatch.open_run(trained / "fsdp_bfloat16"), alone(2, torch.bfloat16)
    assert {layer.dtype for layer in run.coverage} == {"bfloat16"}
    for metric in METRICS:
        if metric.name not in SHARDED:
            off = apart(run.metric(metric.name)[0], expected.metric(metric.name)[0])
            assert off <= (0 if metric.merge in EXACT else MEANS), metric.name


@pytest.mark.parametrize("way", ALL)
def test_a_scalar_of_a_sampled_step_is_the_mean_over_the_ranks_that_gave_it(
    way: str, trained: Path, alone: Callable[..., Run]
) -> None:
    """The loss of the global batch; of a pipeline only the last stage gives one. Between samples rank 0's own."""
    steps, losses = attnwatch.open_run(trained / way).scalar("loss")
    is_known = not way.startswith("pipeline") or way == "pipeline_in_v"  # whose last stage is with the first
    assert steps.tolist() == ([0, 1, 2, 3] if is_known else [0, 2])
    known = alone(len(layers(way)), torch.bfloat16 if way == "fsdp_bfloat16" else torch.float32).scalar("loss")[1]
    assert math.isclose(losses[0], known[0], rel_tol=1e-6)
