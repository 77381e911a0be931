"""One output object in two runs after each other, as a trainer that fits twice uses it: the second loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import offline, tiny
from tests.receiver import Receiver
from tests.webhooks import FIRED, LAYER, update

import attnwatch
from attnwatch.monitor.journal import Output
from attnwatch.monitor.outputs.courier import Courier, Undelivered
from attnwatch.monitor.outputs.trackers import MlflowOutput, TensorBoardOutput, WandbOutput
from attnwatch.monitor.outputs.webhook import WebhookOutput

METRICS = ("entropy_ratio",)
CURVE = "attnwatch_entropy_ratio/model.layers.0.self_attn/mean"


def run(place: Path, output: Output) -> None:
    """Three sampled steps, 0 to 2; the only problem there may be is one of the output."""
    model = tiny.llama()
    with attnwatch.watch(model, run=place, every=1, outputs=[output], report=False, rules=[]) as monitor:
        for _ in range(3):
            model(**torch.utils.data.default_collate(tiny.texts(2))).loss.backward()
            monitor.step()
    assert monitor.problems == []


def test_tensorboard_shows_a_second_run_beside_the_first(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = TensorBoardOutput(tmp_path / "events", METRICS)
    for number in range(3):
        run(tmp_path / f"run{number}", output)
    for name in ("events", "events-2", "events-3"):
        found = EventAccumulator(str(tmp_path / name))
        found.Reload()
        assert [event.step for event in found.Scalars(CURVE)] == [0, 1, 2]


@pytest.mark.parametrize("is_given", [False, True])
def test_mlflow_shows_each_run_in_the_one_that_is_active_then(
    is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all in the one that was given."""
    with offline.mlflow(tmp_path, monkeypatch) as mlflow:
        client = mlflow.MlflowClient()
        own = client.create_run(client.create_experiment("own")).info.run_id if is_given else None
        output = MlflowOutput(own, METRICS)
        shown = []
        for number in range(2):
            with mlflow.start_run() as active:
                run(tmp_path / f"run{number}", output)
            shown.append(client.get_metric_history(own or active.info.run_id, CURVE))
        assert [len(points) for points in shown] == ([3, 6] if is_given else [3, 3])


def test_wandb_shows_each_run_in_the_one_that_is_open_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb itself refuses rows of a run that is finished."""
    with offline.wandb(tmp_path, monkeypatch) as wandb:
        output = WandbOutput(metrics=METRICS, commit=True)
        for number in range(2):
            with wandb.init(project="tests") as own:
                run(tmp_path / f"run{number}", output)
                assert own.summary[CURVE] > 0


def test_a_webhook_posts_on(monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("ATTNWATCH_WEBHOOK", f"http://{receiver.host}/")
        output = WebhookOutput()
        for alert in (FIRED, LAYER):
            output.write(update(alert))
            output.close()
        rules = [body["alerts"][0]["labels"]["alertname"] for body in receiver.bodies(2, wait_for)]
    assert rules == [FIRED.rule, LAYER.rule]


def test_what_hangs_at_the_end_of_a_run_does_not_keep_from_the_next(wait_for: Callable[..., Any]) -> None:
    """And what was told of the first is not told again."""
    hangs, delivered = threading.Event(), []

    def deliver(thing: str) -> None:
        if thing == "hangs":
            hangs.wait()
        delivered.append(thing)

    courier = Courier(deliver, "test")
    courier.take("hangs")
    with pytest.raises(Undelivered, match=r"^the last updates were not delivered within 0\.1 s$"):
        courier.close(0.1)
    courier.take("next")
    wait_for(lambda: delivered == ["next"], "the next")
    begun = time.perf_counter()
    courier.close(30)
    assert time.perf_counter() - begun < 20
    assert courier.complaint() is None
    hangs.set()
