"""Lists of checkpoints as people have them: no steps in their names, layers that come and go; what the scan says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.checkpoints import HEADS, weights

from attnwatch.monitor.cli import main
from attnwatch.monitor.run import open_run

SCAN = ("scan", "--heads", str(HEADS))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ("ema.pt", "model.pt"),
            "2 checkpoints (steps are not in all names, so counted from 0, {0}); the last, 1, {1}:",
        ),
        (("step_9.pt", "step_10.pt"), "2 checkpoints, step 9 to 10; the last, {1}:"),
    ],
)
def test_the_order_of_checkpoints_is_told(
    names: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is from, and which are its ends. The run is named after what holds them, not after one of them."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in names:
        torch.save(weights(), f"base/{name}")
    assert main([*SCAN, "base", "--out", "run"]) == 0
    told = words.format(*(f"base/{name}" for name in names))
    assert capsys.readouterr().out.splitlines()[0].strip() == told
    assert open_run("run").header["model"] == "base"
    assert main([*SCAN, f"base/{names[0]}", "--out", "one"]) == 0
    assert open_run("one").header["model"] == names[0]


def test_layers_that_the_last_checkpoint_has_no_more_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three layers at step 1, two at step 2, the last of which was renamed: it has no past, the others no present."""
    state = weights()
    torch.save(state, tmp_path / "step_1.pt")
    kept = {name.replace("layers.1", "blocks.1"): x for name, x in state.items() if "layers.2" not in name}
    torch.save(kept, tmp_path / "step_2.pt")
    assert main([*SCAN, str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (
        "not in the last checkpoint, so not in the table: model.layers.1.self_attn to model.layers.2.self_attn "
        "(2 layers), last seen at step 1\n"
    ) in said
    (renamed,) = (line for line in said.splitlines() if line.startswith("model.blocks.1"))
    assert " - " in renamed
    assert "nan" not in said


def test_what_to_do_is_told_once_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN in the weights of two layers: two alerts, one advice."""
    state = weights()
    for layer in (0, 2):
        state[f"model.layers.{layer}.self_attn.q_proj.weight"][0, 0] = torch.nan
    torch.save(state, tmp_path / "model.pt")
    assert main([*SCAN, str(tmp_path / "model.pt")]) == 0
    said = capsys.readouterr().out
    assert said.count("critical: weights_nonfinite") == 2
    assert said.count("what to do about weights_nonfinite: This checkpoint cannot be trained on.") == 1
