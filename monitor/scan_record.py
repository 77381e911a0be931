"""What a scan leaves on the disk: a run of checkpoints, and the journal of layers that it can be made from again."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.records import ordinary
from attnwatch.monitor.run import CHECKPOINTS, EVENTS, HEADER, SAMPLES, SCALARS
from attnwatch.monitor.sample import Coverage, Problem, Sample, UsageError
from attnwatch.monitor.store import RunWriter

JOURNAL = "scan.jsonl"


class Record:
    """A run directory of checkpoints, and the journal of layers that it can always be made from again."""

    def __init__(self, path: Path, described: dict[str, Any], rows: int) -> None:
        """rows: of a layer's values. Raises UsageError where anything but an earlier scan is."""
        self._coverage: tuple[Coverage, ...] = ()
        self._step = 0
        self._lock = threading.Lock()
        self._known = dict(_take_over(path, rows))
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Before anything of a run is there: whenever this process is killed, the directory is an earlier scan's.
            self._journal = open(path / JOURNAL, "ab")  # noqa: SIM115 (open as long as the scan)
        except OSError as error:
            raise UsageError(
                f"expected a new directory or an earlier scan at {str(path)!r}, found: {error.strerror}; name another"
            ) from None
        self._writer = RunWriter(path, described)

    def known(self, key: str) -> NDArray[np.float32] | None:
        return self._known.get(key)

    def keep(self, key: str, layer: str, values: NDArray[np.float32]) -> None:
        data = base64.b64encode(values.astype("<f4").tobytes()).decode()
        line = {"key": key, "layer": layer, "shape": values.shape, "values": data}
        with self._lock:
            self._journal.write(json.dumps(line).encode() + b"\n")
            self._journal.flush()

    def add(self, sample: Sample, coverage: tuple[Coverage, ...], changed: Sequence[Alert]) -> None:
        """One checkpoint, and the alerts that changed at it."""
        step = self._step = sample.step
        if coverage != self._coverage:
            self._coverage = coverage
            layers = [asdict(layer) for layer in coverage]
            self._writer.event({"event": "coverage", "step": step, "layers": layers})
        self._writer.sample(sample)
        for alert in changed:
            if alert.fired_step is not None:
                self._writer.event({"event": "alert", "step": step, **asdict(alert)})

    def close(self, problems: Sequence[Problem], ended: bool) -> None:
        for problem in problems:
            self._writer.event({"event": "problem", **asdict(problem)})
        if ended:
            self._writer.event({"event": "end", "step": self._step})
        self._writer.close()
        self._journal.close()


def _take_over(path: Path, rows: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The layers that an earlier scan finished there; its run is removed, to be written anew with them.

    Raises UsageError for a run of another kind. A torn last line is cut off."""
    if not (path / JOURNAL).is_file():
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"expected a new directory or an earlier scan at {str(path)!r}, found other files in it")
        return
    if (path / HEADER).exists():
        try:
            ordinary(path / HEADER)
            source = json.loads((path / HEADER).read_bytes()).get("source")
        except (OSError, ValueError, AttributeError):
            source = None
        if source != CHECKPOINTS:
            raise UsageError(f"expected a new directory or an earlier scan at {str(path)!r}, found another run")
    content = (path / JOURNAL).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path / JOURNAL, "r+b") as file:
            file.truncate(len(whole))
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            data = np.frombuffer(base64.b64decode(entry["values"]), "<f4").reshape(entry["shape"])
        except (ValueError, KeyError, TypeError):
            continue  # such a layer is measured again
        if data.shape[:1] == (rows,):
            yield str(entry["key"]), data
    for name in (HEADER, SCALARS, EVENTS):
        (path / name).unlink(missing_ok=True)
    if (path / SAMPLES).is_dir():
        for segment in (path / SAMPLES).iterdir():
            if re.fullmatch(r"rank\d+-\d+\.awlog", segment.name):
                segment.unlink()
        (path / SAMPLES).rmdir()
