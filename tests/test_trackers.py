"""What experiment trackers stored of a watched run, read back with their own libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests import offline
from tests.made_samples import sample
from tests.recipes import BATCH, LENGTH, TOKENS, Attention, Decoder, fused

import attnwatch
from attnwatch.monitor.extras import need
from attnwatch.monitor.outputs.layers import over_heads, per_layer
from attnwatch.monitor.outputs.trackers import MlflowOutput, TensorBoardOutput, WandbOutput
from attnwatch.monitor.outputs.trackers.tracker import METRICS
from attnwatch.monitor.run import Run

STEPS = 6
ALWAYS = attnwatch.Rule("always", "critical", "loss > 0", summary="As made up")
LINE = "critical: always at model firing at step 0"


def train(run: Path, outputs: Sequence[attnwatch.Output], between: Callable[[int], object] = lambda step: None) -> Run:
    """A run of six steps, every second one sampled, whose first step fires an alert. between: called before a step."""
    torch.manual_seed(0)
    model = Decoder(partial(Attention, fused))
    with attnwatch.watch(model, run=run, every=2, spectrum_every=2, rules=[ALWAYS], outputs=list(outputs)) as monitor:
        for step in range(STEPS):
            tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            between(step)
            monitor.step(loss=loss)
    return attnwatch.open_run(run)


def expected(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every curve, from what the run recorded."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for metric in METRICS:
        for layer, heads in zip(run.layers, np.moveaxis(run.metric(metric), 1, 0), strict=True):
            for stat, reduce in {"min": np.min, "mean": np.mean, "max": np.max}.items():
                curves[f"attnwatch_{metric}/{layer}/{stat}"] = [
                    (int(step), float(reduce(row.astype(float))))
                    for step, row in zip(run.steps, heads, strict=True)
                    if not np.isnan(row).any()
                ]
    return curves


def assert_curves(found: dict[str, list[tuple[int, float]]], run: Run) -> None:
    """Every curve has its points; those of the spectrum are of the samples that looked at it."""
    curves = expected(run)
    assert {len(points) for points in curves.values()} == {3, 2}
    assert found.keys() == curves.keys()
    for name, points in curves.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        np.testing.assert_allclose([y for _, y in found[name]], [y for _, y in points], rtol=1e-6, err_msg=name)


# --- what all of them show --------------------------------------------------------------------------------------------


def test_a_layer_is_least_mean_and_largest_of_what_was_measured() -> None:
    """Heads 1, 3 and one that was not measured; a layer of which nothing is known; infinities count."""
    nan, inf = np.nan, np.inf
    heads = np.array([[1, nan, 3], [nan, nan, nan], [1, inf, 2], [-inf, inf, 0]], np.float32)
    np.testing.assert_array_equal(over_heads(heads), [[1, nan, 1, -inf], [2, nan, inf, nan], [3, nan, inf, inf]])


def test_what_was_not_measured_is_left_out() -> None:
    found = per_layer(
        sample(7, heads={(0, 0): {"entropy_ratio": 0.25}}, layers=1, width=2), ["entropy_ratio", "bound_use"]
    )
    assert found == {
        "entropy_ratio/layer0/min": 0.25,
        "entropy_ratio/layer0/mean": pytest.approx((0.25 + 0.4) / 2),
        "entropy_ratio/layer0/max": pytest.approx(0.4),
    }


def test_a_metric_that_does_not_exist_is_named_and_training_goes_on(tmp_path: Path) -> None:
    run = train(tmp_path / "run", [TensorBoardOutput(tmp_path / "board", metrics=["entropie"])])
    (problem,) = run.problems
    assert (problem.where, len(run.steps)) == ("TensorBoardOutput", 3)
    assert "no metric 'entropie'; there are: " in problem.text


def test_a_missing_library_is_one_line_that_says_what_to_install() -> None:
    with pytest.raises(
        ImportError, match=r"^expected no_such_library to be installed, found: .*; pip install attnwatch\[x\]$"
    ):
        need("no_such_library.part", "x")


def test_no_tracker_is_imported_before_it_is_used() -> None:
    code = "import sys, attnwatch.monitor.outputs.trackers\n"
    code += "print({'wandb', 'mlflow', 'trackio', 'tensorboard', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def board(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return found


def board_text(found: Any, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(f"{tag}/text_summary")]


def assert_on_board(directory: Path, run: Run) -> None:
    found = board(directory)
    tags = [tag for tag in found.Tags()["scalars"] if tag.startswith("attnwatch_")]
    assert_curves({tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags}, run)
    assert [(e.step, e.value) for e in found.Scalars("attnwatch/alerts_firing")] == [(0, 0), (2, 1), (4, 1)]
    ((step, text),) = board_text(found, "attnwatch/always")
    assert step == 0
    assert text.startswith(f"    always critical at model\n    {LINE} (loss ")
    ((step, text),) = board_text(found, "attnwatch/report")
    assert step == 4
    assert text == f"    always fired at step 0.\n    {run.path / 'report.html'}"


def test_tensorboard_holds_curves_alerts_and_the_verdict(tmp_path: Path) -> None:
    run = train(tmp_path / "run", [TensorBoardOutput(tmp_path / "board")])
    assert_on_board(tmp_path / "board", run)


def test_beside_a_summary_writer_of_the_users_own(tmp_path: Path) -> None:
    """A run of its own in the same place; the user's events are the user's."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "board") as writer:
        output = TensorBoardOutput(writer)
        run = train(tmp_path / "run", [output], between=lambda step: writer.add_scalar("loss", step, step))
    assert_on_board(tmp_path / "board" / "attnwatch", run)
    assert board(tmp_path / "board").Tags()["scalars"] == ["loss"]


def test_a_writer_that_fails_is_named_and_training_goes_on(tmp_path: Path) -> None:
    """Its event file was closed by someone else."""
    output = TensorBoardOutput(tmp_path / "board")
    output._writer.close()
    run = train(tmp_path / "run", [output])
    assert [problem.where for problem in run.problems] == ["TensorBoardOutput"]
    assert (run.ended, len(run.steps)) == (True, 3)


# --- Weights & Biases -------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with offline.wandb(tmp_path, monkeypatch) as library:
        yield library


def wandb_records(wandb: Any, directory: Path) -> dict[str, list[Any]]:
    """What an offline run stored, by kind: a log of LevelDB's format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # what is on its way is written
    (file,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    found: dict[str, list[Any]] = {}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header fits: the rest of the block is empty
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # complete, or the last part
            record = Record()
            record.ParseFromString(whole)
            name, whole = record.WhichOneof("record_type"), b""
            found.setdefault(name, []).append(getattr(record, name))
    return found


def history(records: dict[str, list[Any]]) -> list[dict[str, float]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in records["history"]
    ]


def wandb_curves(rows: list[dict[str, float]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name in row:
            if name.startswith("attnwatch_"):
                curves.setdefault(name, []).append((int(row["attnwatch/step"]), row[name]))
    return curves


def test_wandb_holds_curves_alerts_and_the_report(tmp_path: Path, wandb: Any) -> None:
    """In the rows of the user's own log, whose steps stay what they are."""
    with wandb.init(project="tests") as own:
        run = train(tmp_path / "run", [WandbOutput()], between=lambda step: own.log({"loss": step}, step=10 * step))
        own.log({"loss": STEPS}, step=10 * STEPS)
    records = wandb_records(wandb, tmp_path)
    rows = history(records)
    assert [(row["loss"], row["_step"]) for row in rows] == [(i, 10 * i) for i in range(STEPS + 1)]
    assert_curves(wandb_curves(rows), run)
    assert [row["attnwatch/step"] for row in rows if "attnwatch/step" in row] == [0, 2, 4]
    assert {m.glob_name: m.step_metric for m in records["metric"]}["attnwatch*"] == "attnwatch/step"
    (alert,) = records["alert"]
    assert (alert.title, alert.level) == ("always critical at model", "ERROR")
    assert alert.text.startswith(LINE)
    (artifact,) = (record.artifact if hasattr(record, "artifact") else record for record in records["artifact"])
    assert (artifact.name, artifact.type) == (f"attnwatch-{own.id}", "report")
    (stored,) = artifact.manifest.contents
    assert stored.path == "report.html"
    assert Path(stored.local_path).read_bytes() == (run.path / "report.html").read_bytes()


def test_a_wandb_run_that_logs_nothing_else_can_be_given_rows_of_its_own(tmp_path: Path, wandb: Any) -> None:
    with wandb.init(project="tests") as own:
        run = train(tmp_path / "run", [WandbOutput(own, commit=True)])
    assert_curves(wandb_curves(history(wandb_records(wandb, tmp_path))), run)


def test_without_a_wandb_run_it_says_what_to_call(tmp_path: Path, wandb: Any) -> None:
    run = train(tmp_path / "run", [WandbOutput()])
    assert [(problem.where, problem.text) for problem in run.problems] == [
        ("WandbOutput", "UsageError: expected an open wandb run, found none; call wandb.init() before training")
    ]
    assert len(run.steps) == 3


def test_a_wandb_run_that_was_finished_is_named(tmp_path: Path, wandb: Any) -> None:
    own = wandb.init(project="tests")
    run = train(tmp_path / "run", [WandbOutput()], between=lambda step: step != 2 or own.finish())
    (problem,) = run.problems
    assert (problem.where, problem.step) == ("WandbOutput", 2)
    assert "finished" in problem.text
    assert len(run.steps) == 3


# --- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with offline.mlflow(tmp_path, monkeypatch) as library:
        yield library


def test_mlflow_holds_curves_alerts_and_the_report(tmp_path: Path, mlflow: Any) -> None:
    """The user's run is still theirs, and open."""
    with mlflow.start_run() as own:
        run = train(tmp_path / "run", [MlflowOutput()])
        mlflow.log_metric("loss", 1.0, step=STEPS)
    client, number = mlflow.MlflowClient(), own.info.run_id
    stored = client.get_run(number)
    assert stored.info.status == "FINISHED"
    names = [name for name in stored.data.metrics if name.startswith("attnwatch_")]
    assert_curves({name: [(m.step, m.value) for m in client.get_metric_history(number, name)] for name in names}, run)
    assert stored.data.tags["attnwatch.always"].startswith(LINE)
    (artifact,) = client.list_artifacts(number, "attnwatch")
    copy = client.download_artifacts(number, artifact.path, str(tmp_path))
    assert Path(copy).read_bytes() == (run.path / "report.html").read_bytes()


def test_names_that_mlflow_refuses_are_changed(tmp_path: Path, mlflow: Any) -> None:
    with mlflow.start_run() as own:
        output = MlflowOutput()
        layers = ("h.0#1é", "", "..", "a//b", "h/.", "x" * 300)
        output.log({f"attnwatch_entropy/{layer}/min": float(n) for n, layer in enumerate(layers)}, 3)
        output.close()
    expected = {"h.0_1_": 0, "_": 2, "a/_/b": 3, "h/_": 4}
    stored = mlflow.MlflowClient().get_run(own.info.run_id).data.metrics
    (long,) = (name for name in stored if len(name) == 250)
    assert stored.pop(long) == 5
    assert stored == {f"attnwatch_entropy/{layer}/min": value for layer, value in expected.items()}


def test_without_an_mlflow_run_it_says_what_to_call(tmp_path: Path, mlflow: Any) -> None:
    run = train(tmp_path / "run", [MlflowOutput()])
    (problem,) = run.problems
    assert problem.text == (
        "UsageError: expected an active MLflow run, found none; call mlflow.start_run() before training"
    )


def test_a_tracking_server_that_is_gone_is_named_without_its_password(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing listens on port 9; training goes on."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"):
        monkeypatch.setenv(name, "0")
    mlflow.set_tracking_uri("http://me:p@T0SECRET@127.0.0.1:9")
    run = train(tmp_path / "run", [MlflowOutput(run_id="0123456789abcdef0123456789abcdef")])
    assert len(run.steps) == 3
    assert run.problems
    assert {problem.where for problem in run.problems} == {"MlflowOutput"}
    assert all("127.0.0.1" in problem.text for problem in run.problems)
    assert "T0SECRET" not in str(run.problems) + caplog.text


# --- trackio ----------------------------------------------------------------------------------------------------------

TRACKIO = """
import json, sys
import trackio
import attnwatch
from attnwatch.monitor.outputs.trackers import TrackioOutput
from attnwatch.monitor.sample import Update

stored = attnwatch.open_run(sys.argv[1])
own = trackio.init(project="tests", embed=False)
output = TrackioOutput()
news = stored.alerts
for sample in stored.iter_samples():
    trackio.log({"loss": 1.0}, step=sample.step)
    output.write(Update(sample.step, sample, True, {}, stored.alerts, news, (), (), 0, 0.0, stored.path))
    news = ()
output.close()
trackio.log({"loss": 2.0})
trackio.finish()

from trackio.sqlite_storage import SQLiteStorage
artifact = SQLiteStorage.get_run_artifacts("tests", own.name, own.id)
print(json.dumps([SQLiteStorage.get_logs("tests", own.name), SQLiteStorage.get_alerts("tests", own.name), artifact]))
"""


def test_trackio_holds_curves_alerts_and_the_report(tmp_path: Path) -> None:
    """Fed a stored run in a process of its own: where trackio stores is settled when it is imported."""
    run = train(tmp_path / "run", [])
    settings = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, run.path],
        env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, alerts, artifacts = json.loads(done.stdout.splitlines()[-1])
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(0, 1), (2, 1), (4, 1), (5, 2)]
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name in row:
            if name.startswith("attnwatch_"):
                curves.setdefault(name, []).append((row["step"], row[name]))
    assert_curves(curves, run)
    assert [(row["step"], row["attnwatch/alerts_firing"]) for row in rows if "loss" not in row] == [
        (0, 1),
        (2, 1),
        (4, 1),
    ]
    (alert,) = alerts
    assert (alert["title"], alert["level"], alert["step"]) == ("always critical at model", "error", 0)
    assert alert["text"].startswith(LINE)
    assert [(each["name"], each["type"]) for each in artifacts["output"]] == [("attnwatch-report", "report")]
    page = (run.path / "report.html").read_bytes()
    assert page in [path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
