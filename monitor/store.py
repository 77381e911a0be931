"""The run directory: what a run leaves on disk, written so that kill -9 loses nothing that was acknowledged.

    run.json        what the run is (the session's header), and how to read its samples: "format" and "layouts"
    samples/        rank00000-000001.awlog, -000002, ...: segments of fixed-size records, one record a sample
    scalars.jsonl   {"step": 40, "loss": 2.31}, a line a step; what JSON cannot hold is "NaN", "Infinity", "-Infinity"
    events.jsonl    alerts, coverage, problems, samples that gave nothing ("unmeasured"), the state that a resumed run
                    began with ("resumed"), and the end, a line each; non-finite numbers are null

A layout holds from segment `first_segment` to the next layout. Anyone can read a segment with
`np.memmap(path, np.dtype([(name, kind, tuple(shape)) for name, kind, shape in layout["record"]]), "r")`:
`values` is [metrics, layers, heads] in the order of run.json, and `crc32` covers the bytes that follow it.

Every file has one writer and grows by one unbuffered write at a time; nothing is locked or mapped for writing, so
a network file system will do. Only a full segment and `close` wait for the disk itself (4 ms).
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from attnwatch.monitor.records import Layout, pack, record_fields, segment_name
from attnwatch.monitor.run import EVENTS, FORMAT, HEADER, SAMPLES, SCALARS, Run, open_run
from attnwatch.monitor.sample import Sample, UsageError

__all__ = ["Run", "RunWriter", "StoreError", "open_run"]

SEGMENT_BYTES = 64 << 20


class StoreError(OSError):
    """The disk refused something. The message is one line; what was written before stays readable."""


class RunWriter:
    """Writes a new run directory. `lost` counts the samples, and the lines, that could not be written.

    Raises UsageError when `path` cannot become one: recorded data is never overwritten. The other methods
    raise StoreError when the disk refuses; the next call tries again.
    """

    def __init__(self, path: str | PathLike[str], header: Mapping[str, Any]) -> None:
        """header: what run.json says of the run; its "metrics" are the first axis of every sample's values."""
        self.path = Path(path)
        self.lost = Counter[str]()
        self._header = dict(header)
        self._metrics = tuple(str(metric["name"]) for metric in header["metrics"])
        self._layouts: list[Layout] = []
        self._segment: _Appender | None = None
        self._next_segment = 1
        self._closed = False
        _claim(self.path)
        try:
            self._scalars = _Appender(self.path / SCALARS)
            self._events = _Appender(self.path / EVENTS)
            self._write_header(self._layouts)
        except OSError as error:
            raise _no_place(self.path, error.strerror or str(error)) from error

    def sample(self, sample: Sample) -> None:
        """Appends one record: once this returns, the sample outlives the process."""
        self._check_open()
        shape = (len(self._metrics), len(sample.layers), sample.values.shape[-1])
        if sample.metrics != self._metrics or sample.values.shape != shape:
            raise UsageError(
                f"expected the {len(self._metrics)} metrics of run.json as {list(shape)} values, found "
                f"{len(sample.metrics)} as {list(sample.values.shape)}; start another run for other metrics"
            )
        record = pack(sample)
        try:
            segment = self._segment_for(sample.layers, shape[-1])
            segment.append(record)
        except OSError as error:
            self.lost["samples"] += 1
            if self._segment is not None and self._segment.size:  # an empty one is tried again
                with suppress(OSError):
                    self._leave_segment(flush=False)
            raise self._refused(f"sample of step {sample.step} lost", error) from error
        if segment.size + len(record) > SEGMENT_BYTES:
            try:
                self._leave_segment(flush=True)
            except OSError as error:
                raise self._refused("a full segment may be incomplete", error) from error

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one line. A scalar named "step" is the step."""
        numbers = {name: _number(value) for name, value in scalars.items() if name != "step"}
        self._append(self._scalars, {"step": step, **numbers})

    def event(self, event: Mapping[str, Any]) -> None:
        """Appends one line."""
        self._append(self._events, _finite(event))

    def close(self) -> None:
        """Waits until everything is on the disk itself. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        refused = None
        for file in (self._segment, self._scalars, self._events):
            try:
                if file is not None:
                    file.close(flush=True)
            except OSError as error:
                refused = error
        if refused is not None:
            raise self._refused("its newest data may be incomplete", refused) from refused

    def _append(self, file: _Appender, line: Mapping[str, Any]) -> None:
        self._check_open()
        text = json.dumps(line, allow_nan=False)
        try:
            file.append(text.encode() + b"\n")
        except OSError as error:
            if line.get("event") != "problem":  # which is written again later
                self.lost[f"lines of {file.path.name}"] += 1
            raise self._refused(f"a line of {file.path.name} lost", error) from error

    def _segment_for(self, layers: tuple[str, ...], heads: int) -> _Appender:
        """Where to append: a new segment at first, after a full or a failed one, and for a new layout."""
        if not self._layouts or self._layouts[-1][1:] != (layers, heads):
            self._leave_segment(flush=True)
            layouts = [*self._layouts, Layout(self._next_segment, layers, heads)]
            self._write_header(layouts)  # before its segment appears: who sees a segment can read it
            self._layouts = layouts
        if self._segment is None:
            self._segment = _Appender(self.path / SAMPLES / segment_name(self._next_segment))
            self._next_segment += 1
        return self._segment

    def _leave_segment(self, flush: bool) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close(flush)

    def _write_header(self, layouts: list[Layout]) -> None:
        described = [
            {
                **layout._asdict(),
                "record": record_fields(len(self._metrics), len(layout.layers), layout.heads),
            }
            for layout in layouts
        ]
        header = _finite({**self._header, "format": FORMAT, "layouts": described})
        beside = self.path / f"{HEADER}.tmp"
        try:
            with open(beside, "wb") as file:
                file.write(json.dumps(header, allow_nan=False, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path / HEADER)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"expected an open run, found {str(self.path)!r} closed; write before close()")

    def _refused(self, what: str, error: OSError) -> StoreError:
        return StoreError(f"run {str(self.path)!r}: {what}: {error.strerror or error}")


class _Appender:
    """A new file that grows by whole pieces, one write each. `size`: bytes of its whole pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (stays open as long as the run)

    def append(self, piece: bytes | memoryview) -> None:
        """Raises OSError when not all of it was taken: the file then still ends with a whole piece."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the disk takes what nobody will ever read
            raise OSError(errno.ENOENT, "the file was deleted while it was written")
        try:
            written = os.pwrite(self._file.fileno(), piece, self.size)  # over what a failed one may have left
            if written != len(piece):  # how a filling disk answers first, without an error
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({written} of {len(piece)} bytes taken)")
        except OSError:
            with suppress(OSError):
                self._file.truncate(self.size)
            raise
        self.size += len(piece)

    def close(self, flush: bool) -> None:
        try:
            if flush:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _claim(path: Path) -> None:
    """Makes the directory ours: of two writers that come at once only one can make `samples`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (HEADER, SCALARS, EVENTS):
            if os.path.lexists(path / name):
                raise _no_place(path, f"a directory with {name}")
        (path / SAMPLES).mkdir()
    except FileExistsError:
        found = f"a directory with {SAMPLES}/" if path.is_dir() else "a file"
        raise _no_place(path, found) from None
    except OSError as error:
        raise _no_place(path, error.strerror or str(error)) from error


def _no_place(path: Path, found: str) -> UsageError:
    return UsageError(
        f"expected a new or empty directory at {str(path)!r}, found: {found}; pass another run= or remove that one"
    )


def _number(value: float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _finite(value: Any) -> Any:
    """The same plain data with null for every number that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
