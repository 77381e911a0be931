"""trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.extras import need
from attnwatch.monitor.outputs.notices import step_of
from attnwatch.monitor.outputs.trackers.tracker import METRICS, Tracker, text, title
from attnwatch.monitor.sample import UsageError

LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class TrackioOutput(Tracker):
    """Shows the run in a trackio run, at the training step.

    run: what `trackio.init` gave; None for the current one, now or else when the first sample comes. trackio numbers
    your own logs without `step=` after the highest step so far. Raises ImportError without trackio.
    """

    def __init__(self, run: Any = None, metrics: Sequence[str] = METRICS) -> None:
        super().__init__(metrics)
        self._trackio = need("trackio", "trackio")
        self._given, self._run = run, run or self._trackio.context_vars.current_run.get()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._current().log(dict(values), step=step)

    def alert(self, alert: Alert) -> None:
        level = self._trackio.AlertLevel[LEVELS[alert.severity]]
        self._current().alert(title(alert), text(alert), level, step=step_of(alert))

    def report(self, page: Path) -> None:
        self._current().log_artifact(page, name="attnwatch-report", type="report")

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._run = self._given

    def _current(self) -> Any:
        self._run = self._run or self._trackio.context_vars.current_run.get()
        if self._run is None:
            raise UsageError("expected an open trackio run, found none; call trackio.init() before training")
        return self._run
