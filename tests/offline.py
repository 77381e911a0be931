"""Experiment trackers that keep everything in a directory of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def wandb(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {
        "MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false", "CONSOLE": "off", "DIR": str(place),
        "CACHE_DIR": str(place), "DATA_DIR": str(place), "CONFIG_DIR": str(place), "X_DISABLE_STATS": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    yield wandb
    wandb.teardown()


@contextmanager
def mlflow(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # which set_tracking_uri sets: put back with the others
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((place / "mlruns").as_uri())
    yield mlflow
    mlflow.set_tracking_uri(before)
