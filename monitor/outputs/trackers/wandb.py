"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.extras import need
from attnwatch.monitor.outputs.trackers.tracker import METRICS, Tracker, text, title
from attnwatch.monitor.sample import UsageError

LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
_TITLE = 63
"""Characters that wandb takes."""


class WandbOutput(Tracker):
    """Shows the run in a wandb run, with `attnwatch/step` as x-axis.

    run: None for the open one (`wandb.run`), now or else when the first sample comes.
    commit: False adds each sample to the row that your own next `wandb.log` completes, so that wandb's step stays
    yours; a second sample before that replaces the first. True makes each sample a row of its own, which moves wandb's
    step on by one: for a run that logs more rarely than attnwatch samples, and never with a `step=` that counts
    anything but training steps.

    Raises ImportError without wandb.
    """

    quick = True  # between two of the user's own rows; wandb hands over to a process of its own

    def __init__(self, run: Any = None, metrics: Sequence[str] = METRICS, *, commit: bool = False) -> None:
        super().__init__(metrics)
        self._wandb, self._commit = need("wandb", "wandb"), commit
        self._given, self._run = run, run or self._wandb.run
        self._is_told = False  # of our x-axis

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._current().log({"attnwatch/step": step, **values}, commit=self._commit)

    def alert(self, alert: Alert) -> None:
        self._current().alert(title(alert)[:_TITLE], text(alert), LEVELS[alert.severity], wait_duration=1)

    def report(self, page: Path) -> None:
        run = self._current()
        artifact = self._wandb.Artifact(f"attnwatch-{run.id}", type="report")
        artifact.add_file(str(page))
        run.log_artifact(artifact)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._run, self._is_told = self._given, False

    def _current(self) -> Any:
        self._run = self._run or self._wandb.run
        if self._run is None:
            raise UsageError("expected an open wandb run, found none; call wandb.init() before training")
        if not self._is_told:
            self._is_told = True
            self._run.define_metric("attnwatch/step", hidden=True)
            self._run.define_metric("attnwatch*", step_metric="attnwatch/step")
        return self._run
