"""One sample as a record of fixed size, and a segment of such records: the format of the files in `samples/`."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.sample import Sample

MAGIC = 0x314C5741  # "AWL1" in the file
CHECKED_FROM = 8  # bytes: crc32 covers what follows magic and itself


class Layout(NamedTuple):
    """What the records hold from segment `first_segment` on, until the next layout."""

    first_segment: int
    layers: tuple[str, ...]
    heads: int


class Segment(NamedTuple):
    """A read-only view of one file.

    records: whole records `[N]`, mapped. good `[N]`: whose checksum holds. torn: bytes after the last whole record.
    """

    layout: Layout
    records: NDArray[Any]
    good: NDArray[np.bool_]
    torn: int


def record_fields(metrics: int, layers: int, heads: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """A record, packed and little-endian, as the `(name, kind, shape)` that `np.dtype` takes."""
    return [
        ("magic", "<u4", ()),
        ("crc32", "<u4", ()),
        ("step", "<i8", ()),
        ("time", "<f8", ()),
        ("seconds", "<f4", ()),
        ("values", "<f4", (metrics, layers, heads)),
    ]


def segment_name(number: int) -> str:
    return f"rank00000-{number:06d}.awlog"


def pack(sample: Sample) -> memoryview:
    record = np.zeros(1, record_fields(*sample.values.shape))
    raw = record.view(np.uint8)
    record["magic"] = MAGIC
    record["step"], record["time"], record["seconds"] = sample.step, sample.time, sample.seconds
    record["values"] = sample.values
    record["crc32"] = zlib.crc32(raw[CHECKED_FROM:].data)
    return raw.data


def read_segment(path: Path, metrics: int, layout: Layout, verified: NDArray[np.bool_] | None = None) -> Segment:
    """Maps a segment and verifies checksums (about 1 s a GB). Raises OSError when it cannot be read.

    verified `[N]`: which of the first N records are known to be good; they are not read again.
    """
    record = np.dtype(record_fields(metrics, len(layout.layers), layout.heads))
    count, torn = divmod(ordinary(path).st_size, record.itemsize)
    if not count:  # an empty file cannot be mapped
        return Segment(layout, np.zeros(0, record), np.zeros(0, np.bool_), torn)
    records = np.memmap(path, record, "r", shape=(count,)).view(np.ndarray)
    checked = records.view(np.uint8).reshape(count, record.itemsize)[:, CHECKED_FROM:]
    good = np.zeros(count, np.bool_)
    if verified is not None:
        good[: len(verified)] = verified[:count]
    for row in np.flatnonzero(~good):
        good[row] = records["magic"][row] == MAGIC and records["crc32"][row] == zlib.crc32(checked[row])
    return Segment(layout, records, good, torn)


def ordinary(path: Path) -> os.stat_result:
    """Raises OSError for what is neither a file nor a directory: to open a pipe waits for somebody to write into it."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, "no ordinary file", str(path))
    return found
