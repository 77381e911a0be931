"""Files of JSON lines, read a piece at a time: a run of a million steps has as many of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.records import ordinary

PIECE = 1 << 20
"""Bytes read at a time."""

Column = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps and values of one scalar."""

WRONG = (KeyError, TypeError, ValueError, OverflowError)
"""What `scalars_of` and `columns_of` raise for a line that is none."""


class Mark(NamedTuple):
    """How far a file of lines was read: whole lines, and their bytes."""

    lines: int = 0
    size: int = 0


class Piece(NamedTuple):
    """Whole lines one after the other.

    first: the number of the first one, from 1. lines: what each holds; {} for what is no JSON object. end: the mark
    after the last.
    """

    first: int
    lines: list[dict[str, Any]]
    end: Mark


def read_lines(path: Path, after: Mark = Mark()) -> Iterator[Piece]:  # noqa: B008 (a tuple)
    """The whole lines after a mark; what follows the last newline is still being written. Raises OSError."""
    ordinary(path)
    with open(path, "rb") as file:
        file.seek(after.size)
        torn = b""
        while read := file.read(PIECE):
            whole, newline, torn = (torn + read).rpartition(b"\n")
            if newline:
                texts = whole.split(b"\n")
                first = after.lines + 1
                after = Mark(after.lines + len(texts), after.size + len(whole) + 1)
                yield Piece(first, _parsed(texts), after)


def scalars_of(line: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Step and numbers of a line of scalars."""
    numbers = {name: float(value) for name, value in line.items() if name != "step"}
    return int(np.int64(int(line["step"]))), numbers


def columns_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """The numbers of lines of scalars by name, in the order in which names come up."""
    steps = np.fromiter((int(line["step"]) for line in lines), np.int64, len(lines))
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(lines)):
        if name != "step":
            values = [float(line[name]) for line in lines if name in line]
            has = slice(None) if len(values) == len(lines) else [name in line for line in lines]
            columns[name] = steps[has], np.array(values, np.float64)
    return columns


def _parsed(texts: Sequence[bytes]) -> list[dict[str, Any]]:
    """All at once if they are sound: a call for each costs as much as its numbers."""
    if all(text.startswith(b"{") and text.endswith(b"}") for text in texts):
        lines = _json(b"[" + b",".join(texts) + b"]")
        if isinstance(lines, list) and len(lines) == len(texts):
            return [line if isinstance(line, dict) else {} for line in lines]
    return [line if isinstance(line := _json(text), dict) else {} for text in texts]


def _json(text: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
