"""Reading a run directory, finished or still being written. What its files hold is described in `store.py`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.card import card
from attnwatch.monitor.events import alert_of, plain
from attnwatch.monitor.frames import frame
from attnwatch.monitor.lines import WRONG, Column, Mark, Piece, columns_of, read_lines, scalars_of
from attnwatch.monitor.records import Layout, Segment, ordinary, read_segment, segment_name
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, UsageError

FORMAT = 1
HEADER, SAMPLES, SCALARS, EVENTS = "run.json", "samples", "scalars.jsonl", "events.jsonl"
LOWEST, HIGHEST, THINNED, CHECKPOINTS = "lowest", "highest", "thinned", "checkpoints"
_SEGMENT_NAME = re.compile(r"rank00000-(\d{6,})\.awlog")


class Run:
    """One run as it was when it was opened; open it again to see more of a live one (`open_run(path, before=run)`).

    path: the directory. header: run.json as it stands. rules: as plain dicts. ended: whether it was closed in order.
    exception: the type of the one that ended it ("RuntimeError"), "" for none.
    metrics, layers (names) and heads (the widest layer's): the axes of `metric`. steps, times (unix seconds), seconds
    (cost of the sample): `[S]`, in order of step; where a step was recorded twice the later record counts.
    alerts: the newest state of each, oldest first. coverage: the newest of each layer; coverages: all of it, each with
    the step from which it held. unmeasured: steps at which a sample was to be taken and gave nothing. intervals:
    (step, steps from sample to sample from then on, share of the time that they cost), as a budget changed it. resumed:
    the state of the rule engine with which the run began, None for a fresh one. problems: those it recorded, then
    those of `unreadable`: what could not be read (`where` is the file, `step` the last one read before it).
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    seconds: NDArray[np.float32]
    alerts: tuple[Alert, ...]
    coverage: tuple[Coverage, ...]
    coverages: tuple[tuple[int, tuple[Coverage, ...]], ...]
    unmeasured: tuple[int, ...]
    intervals: tuple[tuple[int, int, float], ...]
    resumed: dict[str, Any] | None
    ended: bool
    exception: str

    def __init__(self, path: Path, header: dict[str, Any], numbers: list[int], before: Run | None = None) -> None:
        """numbers: the segments, listed before `header` was read, so that it describes all of them.

        before: the same run as it was opened earlier: its samples and scalars are not read again.
        """
        self.path, self.header = path, header
        self.metrics = tuple(plain(Metric, metric) for metric in header["metrics"])
        self.rules = tuple(dict(rule) for rule in header.get("rules", ()))
        layouts = [Layout(int(x["first_segment"]), tuple(x["layers"]), int(x["heads"])) for x in header["layouts"]]
        self.layers = tuple(dict.fromkeys(name for layout in reversed(layouts) for name in layout.layers))
        self.heads = max((layout.heads for layout in layouts), default=0)
        self._reported: list[Problem] = []
        self._unreadable: list[Problem] = []
        self._verified: dict[int, NDArray[np.bool_]] = {} if before is None else dict(before._verified)
        self._segments = list(self._read_segments(numbers, layouts))
        self._index_samples()
        self._read_scalars(before)
        self._read_events()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (*self._reported, *self._unreadable)

    @property
    def unreadable(self) -> tuple[Problem, ...]:
        return tuple(self._unreadable)

    @property
    def is_thinned(self) -> bool:
        """Whether samples are left out of it (`attnwatch thin`)."""
        return THINNED in self.header

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
        index = self._index_of(name)
        column = {layer: number for number, layer in enumerate(self.layers)}
        values = np.full((len(self.steps), len(self.layers), self.heads), np.nan, np.float32)
        for number, segment in enumerate(self._segments):
            here = np.flatnonzero(self._segment_of == number)
            layers = [column[layer] for layer in segment.layout.layers]
            measured = segment.records["values"][self._row_of[here], index]
            values[here[:, None], layers, : segment.layout.heads] = measured
        return values

    def envelope(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Two of `[S, L, H]`: least and largest of one metric over the samples that each sample stands for.

        Both are `metric(name)` unless the run is thinned. Raises UsageError with the names that exist.
        """
        bounds = self.metric(name), self.metric(name)
        for bound, folder in zip(bounds, (LOWEST, HIGHEST) if self.is_thinned else (), strict=False):
            groups = open_run(self.path / folder)
            here = np.searchsorted(self.steps, groups.steps)
            layers = [self.layers.index(layer) for layer in groups.layers]
            bound[here[:, None], layers, : groups.heads] = groups.metric(name)
        return bounds

    def history(self, name: str, layer: str, head: int) -> NDArray[np.float32]:
        """`[S]` of one metric of one head, NaN where not measured: reads no other head's numbers. Raises UsageError
        with the metrics that exist."""
        index = self._index_of(name)
        values = np.full(len(self.steps), np.nan, np.float32)
        for number, segment in enumerate(self._segments):
            if layer in segment.layout.layers and head < segment.layout.heads:
                here = np.flatnonzero(self._segment_of == number)
                place = segment.layout.layers.index(layer)
                values[here] = segment.records["values"][self._row_of[here], index, place, head]
        return values

    def iter_samples(self, first: int = 0) -> Iterator[Sample]:
        """The samples as they were recorded, in order of step: each with the layers known at its time.

        first: how many to leave out at the beginning.
        """
        return map(self._sample, range(first, len(self.steps)))

    def iter_scalars(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and numbers of each line that was there when the run was opened, in the order they were recorded."""
        for piece in self._pieces(SCALARS):
            for line in piece.lines[: self._scalars_read.lines - piece.first + 1]:
                with suppress(*WRONG):  # named in `problems`
                    yield scalars_of(line)
            if piece.end >= self._scalars_read:
                return

    @property
    def last(self) -> Sample | None:
        """The newest sample; None before the first."""
        return self._sample(len(self.steps) - 1) if len(self.steps) else None

    def to_pandas(self, what: str = "samples") -> Any:
        """A `pandas.DataFrame` (extra `pandas`).

        what: "samples": a row for each head at each sampled step (`step`, `layer`, `head`, then every metric; NaN where
        not measured, no row where nothing was). "scalars": a row for each step that passed some, NaN for the others.
        "alerts": a row for each, with the fields of `Alert`.
        Raises UsageError for another `what`, ImportError without pandas.
        """
        return frame(self, what)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        steps = f"steps {self.steps[0]} to {self.steps[-1]}, " if len(self.steps) else ""
        now = f"{len(self.steps)} samples, {steps}{'ended' if self.ended else 'not ended'}, in {self.path}"
        layers = self.coverage
        if self.header.get("source") == CHECKPOINTS:  # of saved weights, that were found and not verified
            layers = tuple(replace(each, state=each.state.replace("verified", "placed")) for each in layers)
            now = f"saved weights, placed by name and shape: nothing was run; {now}"
        return card("attnwatch run", now, layers, self.alerts, self.last, self.problems)

    def _sample(self, index: int) -> Sample:
        segment = self._segments[self._segment_of[index]]
        record = segment.records[self._row_of[index]]
        step, time, seconds = int(record["step"]), float(record["time"]), float(record["seconds"])
        metrics, values = tuple(metric.name for metric in self.metrics), np.array(record["values"], np.float32)
        return Sample(step, time, metrics, segment.layout.layers, values, seconds)

    def _index_of(self, name: str) -> int:
        names = [metric.name for metric in self.metrics]
        if name not in names:
            raise _unknown("metric", name, names)
        return names.index(name)

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
                path, verified = self.path / SAMPLES / name, self._verified.get(number)
                segment = read_segment(path, len(self.metrics), layout, verified)
            except OSError as error:
                self._cannot_read(f"{SAMPLES}/{name}", f"cannot be read: {error.strerror}", step)
                continue
            self._verified[number] = segment.good
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
        found = list(zip(self._segments, rows, strict=True))
        steps = _joined((segment.records["step"][row] for segment, row in found), np.int64)
        newest = _newest(steps)
        self.steps = steps[newest]
        self.times = _joined((segment.records["time"][row] for segment, row in found), np.float64)[newest]
        self.seconds = _joined((segment.records["seconds"][row] for segment, row in found), np.float32)[newest]
        self._row_of = _joined(rows, np.int64)[newest]
        self._segment_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])[newest]

    def _read_scalars(self, before: Run | None) -> None:
        self._scalars: dict[str, Column] = {}
        self._scalars_read = Mark()
        if before is not None:
            self._scalars, self._scalars_read = dict(before._scalars), before._scalars_read
            self._unreadable += [problem for problem in before._unreadable if problem.where == SCALARS]
        columns: dict[str, list[Column]] = {}
        step = 0
        for piece in self._pieces(SCALARS, self._scalars_read):
            self._scalars_read = piece.end
            lines = piece.lines
            try:
                found = columns_of(lines)
            except WRONG:
                lines = self._sound(piece, step)
                found = columns_of(lines)
            for name, column in found.items():
                columns.setdefault(name, []).append(column)
            step = int(lines[-1]["step"]) if lines else step
        for name, columns_found in columns.items():
            known = [self._scalars[name]] if name in self._scalars else []
            steps, values = map(np.concatenate, zip(*known, *columns_found, strict=True))
            newest = _newest(steps)
            self._scalars[name] = steps[newest], values[newest]

    def _sound(self, piece: Piece, step: int) -> list[dict[str, Any]]:
        """The lines that are steps with their numbers; the others are named. step: the last one before the piece."""
        sound = []
        for number, line in enumerate(piece.lines, piece.first):
            try:
                step, _ = scalars_of(line)
                sound.append(line)
            except WRONG:
                self._cannot_read(SCALARS, f"line {number} is no step with its numbers, left out", step)
        return sound

    def _read_events(self) -> None:
        alerts: dict[tuple[str, str, int], Alert] = {}
        coverage: dict[str, Coverage] = {}
        coverages: list[tuple[int, tuple[Coverage, ...]]] = []
        unmeasured: list[int] = []
        intervals: list[tuple[int, int, float]] = []
        self.ended, self.exception, self.resumed = False, "", None
        step = 0
        for number, line in self._lines(EVENTS):
            try:
                step = int(line["step"])
                match line["event"]:
                    case "alert":
                        alert = alert_of(line)
                        alerts[alert.rule, alert.place, alert.pending_step] = alert
                    case "coverage":
                        layers = tuple(plain(Coverage, layer) for layer in line["layers"])
                        coverages.append((step, layers))
                        coverage.update((layer.name, layer) for layer in layers)
                    case "unmeasured":
                        unmeasured.append(step)
                    case "interval":
                        intervals.append((step, int(line["interval"]), float(line["share"])))
                    case "resumed":
                        self.resumed = dict(line["state"])
                    case "problem":
                        self._reported.append(plain(Problem, line))
                    case "end":
                        self.ended, self.exception = True, str(line.get("exception", ""))
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self._cannot_read(EVENTS, f"line {number} is no event that this version knows, left out", step)
        self.alerts, self.coverage = tuple(alerts.values()), tuple(coverage.values())
        self.coverages, self.unmeasured, self.intervals = tuple(coverages), tuple(unmeasured), tuple(intervals)

    def _lines(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and content of each whole line; {} for what is no JSON object."""
        for piece in self._pieces(name):
            yield from enumerate(piece.lines, piece.first)

    def _pieces(self, name: str, after: Mark = Mark()) -> Iterator[Piece]:  # noqa: B008 (a tuple)
        try:
            yield from read_lines(self.path / name, after)
        except OSError as error:
            self._cannot_read(name, f"cannot be read: {error.strerror}", 0)

    def _cannot_read(self, where: str, text: str, step: int) -> None:
        problem = Problem(step, where, text)
        if problem not in self._unreadable:  # an earlier reading may have said so
            self._unreadable.append(problem)


def open_run(path: str | PathLike[str], *, before: Run | None = None) -> Run:
    """The run in a directory (or its run.json), also while it is being written.

    Verifies every checksum once, here (about 1 s a GB); values stay on disk until `Run.metric` asks for them.
    before: this run as it was opened earlier; only what came since is read.
    Raises UsageError when there is no run, or none that this version can read.
    """
    folder = as_path(path, "a run")
    if folder.name == HEADER and not folder.is_dir():
        folder = folder.parent
    names, unlisted = [], None
    try:
        names = [_SEGMENT_NAME.fullmatch(entry.name) for entry in (folder / SAMPLES).iterdir()]
    except OSError as error:
        unlisted = error.strerror
    numbers = sorted(int(name[1]) for name in names if name)
    header = _read_header(folder)  # says better what is wrong where there is no run
    if before is not None and {**before.header, "layouts": ()} != {**header, "layouts": ()}:
        before = None  # another run took its place
    try:
        run = Run(folder, header, numbers, before)
        if unlisted is not None:
            run._cannot_read(f"{SAMPLES}/", f"cannot be read: {unlisted}", 0)
        return run
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
        ordinary(folder / HEADER)
        header = json.loads((folder / HEADER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        found = f"a directory without {HEADER}" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        inside = sorted(header.parent.name for header in folder.glob(f"*/{HEADER}"))
        if inside:
            found += f" (runs in it: {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''})"
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
    if (steps[1:] > steps[:-1]).all():
        return np.arange(len(steps))
    _, from_the_end = np.unique(steps[::-1], return_index=True)
    return (len(steps) - 1 - from_the_end).astype(np.int64)
