"""When eigenvalues are taken, and of which layers: after the step, of all together, or of some in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import H, Mixer, T, parts, step, tokens, values_of
from tests.test_probe import Stack
from torch import Tensor, nn

import attnwatch
from attnwatch.hooks import maps, statistics
from attnwatch.hooks import probe as probes
from attnwatch.hooks.eigen import eigenvalues
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe, Reading


def two_micro_batches(probe: Probe, model: nn.Module) -> Reading:
    probe.arm(look=True)
    for seed in (0, 1):
        model(tokens(seed=seed)).sum().backward()
    return probe.finish()


def test_what_finds_no_room_to_wait_is_the_same_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for nothing, for the maps of one micro-batch (2 layers of H maps of T x T a sequence), for all."""
    model = Stack().train()
    readings = []
    for room in (0, 2 * len(tokens()) * H * T * T * 4, probes.KEPT):
        monkeypatch.setattr(probes, "KEPT", room)
        readings.append(two_micro_batches(Probe(model), model))
    updates = [name.startswith("update") for name in (metric.name for metric in METRICS)]  # kept in that room too
    for reading in readings:
        np.testing.assert_allclose(reading.values[~np.array(updates)], readings[-1].values[~np.array(updates)], 1e-6)
        assert np.isfinite(values_of(reading, "first")["map_rank"]).all()


@pytest.mark.parametrize(("block", "lost"), [(2**8, ["second"]), (2**20, ["first", "second"])])
def test_maps_without_eigenvalues_leave_the_rest_known(
    block: int, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAPACK gives up on one matrix: the layer, or all measured as one with it, are named, without a map rank."""
    monkeypatch.setattr(statistics, "BLOCK", block)
    model = Stack().train()
    expected = step(Probe(model), model, tokens())
    given = []

    def gives_up(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        given.append(len(matrices))
        if len(given) in (1, 4 - len(lost)):  # all together, then the last of the batches alone
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return eigenvalues(matrices, dtype)

    monkeypatch.setattr(maps, "eigenvalues", gives_up)
    reading = step(Probe(model), model, tokens())
    assert len(given) == 4 - len(lost)
    assert [where for where, _ in reading.problems] == lost
    assert all("failed to converge" in text for _, text in reading.problems)
    for name in ("first", "second"):
        found, known = values_of(reading, name), values_of(expected, name)
        for metric in ("entropy", "qk_rank"):
            np.testing.assert_array_equal(found[metric], known[metric])
        np.testing.assert_array_equal(found["map_rank"], np.nan if name in lost else known["map_rank"])


def test_layers_take_turns_to_be_looked_at() -> None:
    """Of five, two in a look: all in the first, then 2 and 3, 4 and 0, 1 and 2, ...; the others are as before."""
    model = nn.Sequential(*(Mixer(parts(seed=n)) for n in range(5))).train()
    probe = Probe(model, share=2)
    looked = []
    for look in (True, False, True, True, True):
        reading = step(probe, model, tokens(), look=look)
        ranks = [np.isfinite(values_of(reading, str(n))["qk_rank"]).all() for n in range(5)]
        looked.append([n for n, known in enumerate(ranks) if known])
        assert {layer.state for layer in reading.layers} == {"verified"}
        assert np.isfinite(values_of(reading, "0")["entropy"]).all()
    assert looked == [[0, 1, 2, 3, 4], [], [2, 3], [0, 4], [1, 2]]


def test_turns_reach_the_probe_and_the_rules(tmp_path: Path) -> None:
    """Each sample has the spectrum of one layer; the rules know the other one's of before."""
    model = Stack().train()
    rule = attnwatch.Rule("known", "info", "qk_rank > 0", share=1.0)
    options: dict[str, Any] = {"every": 1, "spectrum_every": 1, "spectrum_layers": 1, "rules": [rule], "report": False}
    with attnwatch.watch(model, run=tmp_path / "run", **options) as monitor:
        for _ in range(4):
            model(tokens()).sum().backward()
            monitor.step()
        assert [alert.state for alert in monitor.alerts] == ["firing"]
    known = np.isfinite(attnwatch.open_run(tmp_path / "run").metric("qk_rank")).all(2)
    assert known.tolist() == [[True, True], [False, True], [True, False], [False, True]]
