"""MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.extras import need
from attnwatch.monitor.outputs.courier import Courier, Undelivered
from attnwatch.monitor.outputs.trackers.tracker import METRICS, Tracker, text
from attnwatch.monitor.sample import Update, UsageError

_BATCH = 1000
"""Metrics that one request may hold."""

_FORBIDDEN = re.compile(r"[^\w\-. :/]|(?<![^/])\.{0,2}(?![^/])", re.ASCII)
"""In the name of a metric or a tag; and parts between "/" that are no name of a file."""

_LONGEST, _LONGEST_TEXT = 250, 5000
"""Characters of a name, and of a tag's value."""


class MlflowOutput(Tracker):
    """Shows the run in an MLflow run: metrics, a tag `attnwatch.RULE` for each rule that fired, the report as artifact.

    run_id: None for the run that is active (`mlflow.active_run()`) now, or else when the first sample comes. patience:
    seconds that `close` waits. Requests leave from a thread of their own: a slow tracking server holds up no step.

    Raises ImportError without mlflow.
    """

    quick = True  # a courier carries the requests

    def __init__(self, run_id: str | None = None, metrics: Sequence[str] = METRICS, *, patience: float = 30.0) -> None:
        super().__init__(metrics)
        self._mlflow = need("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient()
        self._given, self._id, self._patience = run_id, run_id or self._active(), patience
        self._courier = Courier(self._deliver, "attnwatch-mlflow")

    def write(self, update: Update) -> str | None:
        super().write(update)
        return self._courier.complaint()

    def log(self, values: Mapping[str, float], step: int) -> None:
        metric, now = self._mlflow.entities.Metric, int(time.time() * 1000)
        found = [metric(_name(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(found), _BATCH):
            self._send("log_batch", metrics=found[start : start + _BATCH])

    def alert(self, alert: Alert) -> None:
        self._send("set_tag", key=_name(f"attnwatch.{alert.rule}"), value=text(alert)[:_LONGEST_TEXT])

    def report(self, page: Path) -> None:
        self._send("log_artifact", local_path=str(page), artifact_path="attnwatch")

    def close(self) -> None:
        """Raises Undelivered when something did not get out."""
        try:
            super().close()
            self._courier.close(self._patience)
        finally:
            self._id = self._given

    def _active(self) -> str | None:
        run = self._mlflow.active_run()  # of this thread
        return None if run is None else str(run.info.run_id)

    def _send(self, method: str, **arguments: Any) -> None:
        self._id = self._id or self._active()
        if self._id is None:
            raise UsageError("expected an active MLflow run, found none; call mlflow.start_run() before training")
        self._courier.take(partial(getattr(self._client, method), self._id, **arguments))

    def _deliver(self, request: Any) -> None:
        try:
            request()
        except Exception as error:
            # The address of a tracking server may hold a password.
            found = re.sub(r"//[^/\s]*@", "//", " ".join(str(error).split()))
            raise Undelivered(f"{type(error).__name__}: {found[:300]}") from None


def _name(name: str) -> str:
    """One that MLflow takes: a single other one would cost the whole request."""
    name = _FORBIDDEN.sub("_", name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2 - 2]}__{name[-_LONGEST // 2 :]}"
