"""TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.extras import need
from attnwatch.monitor.outputs.notices import step_of
from attnwatch.monitor.outputs.trackers.tracker import METRICS, Tracker, text, title


class TensorBoardOutput(Tracker):
    """Shows the run in TensorBoard: curves, alerts as texts, at the end the verdict and where the report is.

    where: a directory to write event files in; or your own `SummaryWriter`: then they go to `attnwatch/` in its
    directory, a run of its own beside yours, since its `add_scalar` takes too long for a sample's some hundred values.
    What comes after `close`, of a trainer that fits again, goes beside it, to `where-2` and so on.
    Raises ImportError without tensorboard, OSError for a directory that cannot be written.
    """

    def __init__(self, where: Any, metrics: Sequence[str] = METRICS) -> None:
        super().__init__(metrics)
        is_path = isinstance(where, str | os.PathLike)
        self._where = os.fspath(where) if is_path else f"{where.get_logdir()}/attnwatch"
        self._writer: EventWriter | None = EventWriter(self._where)
        self._times = 1
        self._step = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._step = step
        self._events().add_values(values, step)

    def alert(self, alert: Alert) -> None:
        # Indented text is Markdown's for "as it is": a hostile name is no link and no image.
        self._events().add_text(f"attnwatch/{alert.rule}", f"    {title(alert)}\n    {text(alert)}", step_of(alert))

    def report(self, page: Path) -> None:
        """TensorBoard keeps no files: the verdict as a text, and the report's path."""
        sentence = json.loads(page.with_name("summary.json").read_text(encoding="utf-8"))["verdict"]["sentence"]
        self._events().add_text("attnwatch/report", f"    {sentence}\n    {page}", self._step)

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            super().close()
        finally:
            self._writer.close()
            self._writer = None

    def _events(self) -> EventWriter:
        if self._writer is None:
            self._times += 1
            self._writer = EventWriter(f"{self._where}-{self._times}")
        return self._writer


class EventWriter:
    """An event file by the tensorboard library alone, without torch, and with one event for all values of a step."""

    def __init__(self, directory: str) -> None:
        self._proto = need("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = need("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._text = need("tensorboard.plugins.text.summary_v2", "tensorboard")
        writers = need("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._file = writers.EventFileWriter(directory)

    def add_values(self, values: Mapping[str, float], step: int) -> None:
        value = self._summary.Summary.Value
        self._add(self._summary.Summary(value=[value(tag=tag, simple_value=x) for tag, x in values.items()]), step)

    def add_text(self, tag: str, text: str, step: int | None) -> None:
        self._add(self._text.text_pb(f"{tag}/text_summary", text), step)

    def close(self) -> None:
        self._file.close()

    def _add(self, summary: Any, step: int | None) -> None:
        self._file.add_event(self._proto.Event(wall_time=time.time(), step=step, summary=summary))
