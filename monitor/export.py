"""A run as tidy rows for other programs: CSV, JSON lines or Parquet, a sample at a time whatever the run's length."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.extras import need
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Sample

ROWS = 1 << 16
"""Rows of a Parquet row group, about."""

Columns = dict[str, Sequence[Any] | NDArray[Any]]
"""Equally long columns by name. None or NaN: not known."""


class Table(NamedTuple):
    """Column names with their kinds ("int", "float" or "text"), and the rows, some at a time."""

    kinds: dict[str, str]
    parts: Iterator[Columns]


def table(run: Run, what: str) -> Table:
    """samples: a row for every head of every sample (step, layer, head, then the metrics). scalars: a row for every
    step that passed some, as they were recorded. alerts: a row for each that fired."""
    if what == "samples":
        metrics = {metric.name: "float" for metric in run.metrics}
        return Table({"step": "int", "layer": "text", "head": "int", **metrics}, map(_samples, run.iter_samples()))
    if what == "scalars":
        names = run.scalar_names
        return Table({"step": "int", **dict.fromkeys(names, "float")}, _scalars(run))
    kinds = {
        "rule": "text", "severity": "text", "state": "text", "place": "text", "pending_step": "int",
        "fired_step": "int", "resolved_step": "int", "share": "float", "heads": "text", "values": "text",
        "summary": "text", "advice": "text",
    }  # fmt: skip
    return Table(kinds, iter([_alerts(run, kinds)] if run.alerts else []))


def write_csv(content: Table, file: IO[str]) -> None:
    """What is not known is an empty field, infinity is `inf`."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(content.kinds)
    for part in content.parts:
        writer.writerows(["" if cell is None else cell for cell in row] for row in _rows(part, content.kinds))


def write_json(content: Table, file: IO[str]) -> None:
    """One object a line; what is not known is null, and so is infinity, which JSON has not."""
    for part in content.parts:
        for row in _rows(part, content.kinds):
            cells = [None if isinstance(cell, float) and math.isinf(cell) else cell for cell in row]
            file.write(json.dumps(dict(zip(content.kinds, cells, strict=True)), allow_nan=False) + "\n")


def write_parquet(content: Table, path: str) -> None:
    """What is not known is null. Raises ImportError without pyarrow."""
    pyarrow, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    types = {"int": pyarrow.int64(), "float": pyarrow.float64(), "text": pyarrow.string()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in content.kinds.items()])
    waiting: list[Any] = []
    with parquet.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            if waiting:
                writer.write_table(pyarrow.concat_tables(waiting))
                waiting.clear()

        for part in content.parts:
            arrays = [
                pyarrow.array(part[name], type=types[kind], from_pandas=True) for name, kind in content.kinds.items()
            ]
            waiting.append(pyarrow.Table.from_arrays(arrays, schema=schema))
            if sum(len(each) for each in waiting) >= ROWS:
                flush()
        flush()


def _rows(part: Columns, names: dict[str, str]) -> Iterator[list[Any]]:
    """Plain Python cells, None for what is not known."""
    columns = [column.tolist() if isinstance(column := part[name], np.ndarray) else column for name in names]
    for row in zip(*columns, strict=True):
        yield [None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row]


def _samples(sample: Sample) -> Columns:
    """Heads that gave any number: where layers differ in width, the rest is padding."""
    rows, heads = np.nonzero(~np.isnan(sample.values).all(axis=0))
    layers = [sample.layers[row] for row in rows]
    measured = sample.values[:, rows, heads].astype(np.float64)
    return {
        "step": np.full(len(rows), sample.step),
        "layer": layers,
        "head": heads,
        **dict(zip(sample.metrics, measured, strict=True)),
    }


def _scalars(run: Run) -> Iterator[Columns]:
    """A step that was passed more than once, one scalar at a time say, is one row; the last value counts."""
    names = run.scalar_names
    step: int | None = None
    row: dict[str, float] = {}
    for at, numbers in run.iter_scalars():
        if step is not None and at != step:
            yield {"step": [step], **{name: [row.get(name, math.nan)] for name in names}}
            row = {}
        step = at
        row |= numbers
    if step is not None:
        yield {"step": [step], **{name: [row.get(name, math.nan)] for name in names}}


def _alerts(run: Run, kinds: dict[str, str]) -> Columns:
    rows = []
    for alert in run.alerts:
        row = asdict(alert)
        row["heads"] = " ".join(f"{layer}/{head}" for layer, head in alert.heads)
        row["values"] = json.dumps({k: v if math.isfinite(v) else None for k, v in alert.values.items()})
        rows.append(row)
    return {name: [row[name] for row in rows] for name in kinds}
