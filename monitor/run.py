"""Reading a run directory, finished or still being written. What its files hold is described in `store.py`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.records import Layout, Segment, read_segment, segment_name
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, UsageError

FORMAT = 1
HEADER, SAMPLES, SCALARS, EVENTS = "run.json", "samples", "scalars.jsonl", "events.jsonl"
Plain = TypeVar("Plain", Alert, Coverage, Metric, Problem)
_SEGMENT_NAME = re.compile(r"rank00000-(\d{6,})\.awlog")


class Run:
    """One run as it was when it was opened; open it again to see more of a live one.

    path: the directory. header: run.json as it stands. rules: as plain dicts. ended: whether it was closed in order.
    metrics, layers (names) and heads (the widest layer's): the axes of `metric`. steps, times (unix seconds), seconds
    (cost of the sample): `[S]`, in order of step; where a step was recorded twice the later record counts.
    alerts: the newest state of each, oldest first. coverage: the newest of each layer; coverages: all of it, each with
    the step from which it held. unmeasured: steps at which a sample was to be taken and gave nothing. resumed: the
    state of the rule engine with which the run began, None for a fresh one. problems: those the run recorded, then what
    could not be read (`where` is the file, `step` the last one read before it).
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    seconds: NDArray[np.float32]
    alerts: tuple[Alert, ...]
    coverage: tuple[Coverage, ...]
    coverages: tuple[tuple[int, tuple[Coverage, ...]], ...]
    unmeasured: tuple[int, ...]
    resumed: dict[str, Any] | None
    ended: bool

    def __init__(self, path: Path, header: dict[str, Any], numbers: list[int]) -> None:
        """numbers: the segments, listed before `header` was read, so that it describes all of them."""
        self.path, self.header = path, header
        self.metrics = tuple(_plain(Metric, metric) for metric in header["metrics"])
        self.rules = tuple(dict(rule) for rule in header.get("rules", ()))
        layouts = [Layout(int(x["first_segment"]), tuple(x["layers"]), int(x["heads"])) for x in header["layouts"]]
        self.layers = tuple(dict.fromkeys(name for layout in reversed(layouts) for name in layout.layers))
        self.heads = max((layout.heads for layout in layouts), default=0)
        self._reported: list[Problem] = []
        self._unreadable: list[Problem] = []
        self._scalars: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._segments = list(self._read_segments(numbers, layouts))
        self._index_samples()
        self._read_scalars()
        self._read_events()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (*self._reported, *self._unreadable)

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """In the order they were first passed."""
        return tuple(self._scalars)

    def scalar(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps `[N]` and values `[N]` of one scalar. Raises UsageError with the names that exist."""
        if name not in self._scalars:
            raise _unknown("scalar", name, self._scalars)
        return self._scalars[name]

    def metric(self, name: str) -> NDArray[np.float32]:
        """`[S, L, H]` of one metric, NaN where not measured. Raises UsageError with the names that exist."""
        names = [metric.name for metric in self.metrics]
        if name not in names:
            raise _unknown("metric", name, names)
        column = {layer: number for number, layer in enumerate(self.layers)}
        values = np.full((len(self.steps), len(self.layers), self.heads), np.nan, np.float32)
        for number, segment in enumerate(self._segments):
            here = np.flatnonzero(self._segment_of == number)
            layers = [column[layer] for layer in segment.layout.layers]
            measured = segment.records["values"][self._row_of[here], names.index(name)]
            values[here[:, None], layers, : segment.layout.heads] = measured
        return values

    def iter_samples(self) -> Iterator[Sample]:
        """The samples as they were recorded, in order of step: each with the layers known at its time."""
        metrics = tuple(metric.name for metric in self.metrics)
        for number, row in zip(self._segment_of, self._row_of, strict=True):
            layout, record = self._segments[number].layout, self._segments[number].records[row]
            step, time, seconds = int(record["step"]), float(record["time"]), float(record["seconds"])
            yield Sample(step, time, metrics, layout.layers, np.array(record["values"], np.float32), seconds)

    def iter_scalars(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and numbers of each line that was there when the run was opened, in the order they were recorded."""
        for number, line in self._lines(SCALARS):
            if number > self._scalar_lines:
                return
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # named in `problems`
                yield _scalars(line)

    def _read_segments(self, numbers: list[int], layouts: list[Layout]) -> Iterator[Segment]:
        step = 0
        for before, number in zip([0, *numbers], numbers, strict=False):
            name = segment_name(number)
            if number != before + 1:
                self._cannot_read(f"{SAMPLES}/{segment_name(before + 1)}", "is missing", step)
            layout = next((layout for layout in reversed(layouts) if layout.first_segment <= number), None)
            try:
                if layout is None:
                    raise OSError(0, f"no layout in {HEADER} describes it")
                segment = read_segment(self.path / SAMPLES / name, len(self.metrics), layout)
            except OSError as error:
                self._cannot_read(f"{SAMPLES}/{name}", f"cannot be read: {error.strerror}", step)
                continue
            steps = segment.records["step"].tolist()
            for row, good in enumerate(segment.good):
                if good:
                    step = steps[row]
                else:
                    text = f"record {row + 1} of {len(steps)} is damaged (checksum) and left out"
                    self._cannot_read(f"{SAMPLES}/{name}", text, step)
            if segment.torn and number != numbers[-1]:  # the last one may be growing just now
                self._cannot_read(f"{SAMPLES}/{name}", f"{segment.torn} bytes at its end are no record", step)
            yield segment

    def _index_samples(self) -> None:
        """Where the record of each step is: `_segment_of [S]`, `_row_of [S]`."""
        rows = [np.flatnonzero(segment.good) for segment in self._segments]
        found = [segment.records[row] for segment, row in zip(self._segments, rows, strict=True)]
        steps = _joined((records["step"] for records in found), np.int64)
        newest = _newest(steps)
        self.steps = steps[newest]
        self.times = _joined((records["time"] for records in found), np.float64)[newest]
        self.seconds = _joined((records["seconds"] for records in found), np.float32)[newest]
        self._row_of = _joined(rows, np.int64)[newest]
        self._segment_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])[newest]

    def _read_scalars(self) -> None:
        columns: dict[str, tuple[list[int], list[float]]] = {}
        self._scalar_lines = step = 0
        for number, line in self._lines(SCALARS):
            self._scalar_lines = number
            try:
                step, numbers = _scalars(line)
            except (KeyError, TypeError, ValueError, OverflowError):
                self._cannot_read(SCALARS, f"line {number} is no step with its numbers, left out", step)
                continue
            for name, value in numbers.items():
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        for name, (steps, values) in columns.items():
            newest = _newest(np.array(steps))
            self._scalars[name] = np.array(steps, np.int64)[newest], np.array(values, np.float64)[newest]

    def _read_events(self) -> None:
        alerts: dict[tuple[str, str, int], Alert] = {}
        coverage: dict[str, Coverage] = {}
        coverages: list[tuple[int, tuple[Coverage, ...]]] = []
        unmeasured: list[int] = []
        self.ended, self.resumed = False, None
        step = 0
        for number, line in self._lines(EVENTS):
            try:
                step = int(line["step"])
                match line["event"]:
                    case "alert":
                        alert = _alert(line)
                        alerts[alert.rule, alert.place, alert.pending_step] = alert
                    case "coverage":
                        layers = tuple(_plain(Coverage, layer) for layer in line["layers"])
                        coverages.append((step, layers))
                        coverage.update((layer.name, layer) for layer in layers)
                    case "unmeasured":
                        unmeasured.append(step)
                    case "resumed":
                        self.resumed = dict(line["state"])
                    case "problem":
                        self._reported.append(_plain(Problem, line))
                    case "end":
                        self.ended = True
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self._cannot_read(EVENTS, f"line {number} is no event that this version knows, left out", step)
        self.alerts, self.coverage = tuple(alerts.values()), tuple(coverage.values())
        self.coverages, self.unmeasured = tuple(coverages), tuple(unmeasured)

    def _lines(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and content of each whole line. What follows the last newline is still being written."""
        try:
            lines = (self.path / name).read_bytes().split(b"\n")[:-1]
        except OSError as error:
            self._cannot_read(name, f"cannot be read: {error.strerror}", 0)
            return
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text.decode())
            except (ValueError, RecursionError):
                line = None
            yield number, line if isinstance(line, dict) else {}

    def _cannot_read(self, where: str, text: str, step: int) -> None:
        self._unreadable.append(Problem(step, where, text))


def open_run(path: str | PathLike[str]) -> Run:
    """The run in a directory (or its run.json), also while it is being written.

    Verifies every checksum once, here (about 1 s a GB); values stay on disk until `Run.metric` asks for them.
    Raises UsageError when there is no run, or none that this version can read.
    """
    folder = as_path(path, "a run")
    if folder.name == HEADER and not folder.is_dir():
        folder = folder.parent
    try:
        names = [_SEGMENT_NAME.fullmatch(entry.name) for entry in (folder / SAMPLES).iterdir()]
    except OSError:
        names = []  # the header says better what is wrong
    numbers = sorted(int(name[1]) for name in names if name)
    header = _read_header(folder)
    try:
        return Run(folder, header, numbers)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _unreadable(folder, f"{type(error).__name__}: {error}") from error


def as_path(given: object, what: str) -> Path:
    """What was given as `what`. Raises UsageError for what is no path, or an empty one."""
    try:
        path = os.fspath(given)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"expected {what} to be the path of a directory, found {repr(given)[:60]}; pass its name")
    return Path(path)


def _read_header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / HEADER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        found = f"a directory without {HEADER}" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        raise UsageError(
            f"expected a run directory at {str(folder)!r}, found {found}; give the directory that was passed as run="
        ) from None
    except OSError as error:
        raise _unreadable(folder, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(folder, str(error)) from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise _unreadable(folder, "no format number")
    if header["format"] > FORMAT:
        raise UsageError(
            f"expected a run of format {FORMAT} at {str(folder)!r}, found format {header['format']}; upgrade attnwatch"
        )
    return header


def _unreadable(folder: Path, found: str) -> UsageError:
    found = " ".join(found.split())  # one line, whatever was in the file
    return UsageError(f"expected the {HEADER} of a run in {str(folder)!r}, found: {found}; restore it or leave it out")


def _unknown(what: str, name: str, names: Iterable[str]) -> UsageError:
    return UsageError(f"expected a {what} of this run, found {name!r}; there are: {', '.join(names) or 'none'}")


def _joined(parts: Iterable[NDArray[Any]], kind: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *parts]).astype(kind)


def _newest(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the last record of each step, in order of step."""
    _, from_the_end = np.unique(steps[::-1], return_index=True)
    return (len(steps) - 1 - from_the_end).astype(np.int64)


def _scalars(line: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    numbers = {name: float(value) for name, value in line.items() if name != "step"}
    return int(np.int64(line["step"])), numbers


def _alert(line: Mapping[str, Any]) -> Alert:
    values = {str(name): _float(value) for name, value in line["values"].items()}
    heads = tuple((str(layer), int(head)) for layer, head in line["heads"])
    return _plain(Alert, {**line, "share": _float(line["share"]), "values": values, "heads": heads})


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _plain(kind: type[Plain], line: Mapping[str, Any]) -> Plain:
    """A dataclass from its fields; what a later version may have added is left out."""
    return kind(**{field.name: line[field.name] for field in fields(kind) if field.name in line})
