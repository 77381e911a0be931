"""`attnwatch export`: tidy rows of a run, each number where it was measured and nothing where it was not."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.cli import main
from attnwatch.monitor.sample import Metric, Sample
from attnwatch.monitor.store import RunWriter, open_run

METRICS = ("entropy", "qk_rank")
NAN = float("nan")
ROWS = [
    (0, "a, first", 0, 1.5, 2.0), (0, "a, first", 1, 0.25, None), (0, "b", 0, None, 3.0),
    (10, "a, first", 0, 1.0, None), (10, "b", 0, 0.5, 4.0), (10, "b", 1, 0.125, None),
]  # fmt: skip
"""What the run below holds: a head that gave nothing has no row, a number that is not known is None."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two samples of two layers of two heads, scalars, an alert."""
    header = {"metrics": [asdict(Metric(name, "1", name, "mean")) for name in METRICS], "rules": []}
    writer = RunWriter(tmp_path / "run", header)
    layers = ("a, first", "b")
    first = [[[1.5, 0.25], [NAN, NAN]], [[2.0, NAN], [3.0, NAN]]]
    second = [[[1.0, NAN], [0.5, 0.125]], [[NAN, NAN], [4.0, NAN]]]
    for step, values in ((0, first), (10, second)):
        writer.sample(Sample(step, 0.0, METRICS, layers, np.array(values, np.float32)))
    for step, numbers in ((0, {"loss": 2.5}), (1, {"loss": NAN, "lr": 0.1}), (2, {"loss": 2.0}), (2, {"lr": 0.2})):
        writer.scalars(step, numbers)
    alert = Alert(
        "low", "warning", "firing", "b", 0, 10, None, 0.5, (("b", 1), ("b", 0)), {"entropy": 0.125, "x": NAN}, "s", "do"
    )
    writer.event({"event": "alert", "step": 10, **asdict(alert)})
    writer.close()
    return tmp_path / "run"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["export", *arguments]) == 0
    return capsys.readouterr().out


def test_csv_has_a_row_for_every_measured_head(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read back by a CSV reader: names with commas whole, missing numbers empty."""
    rows = list(csv.reader(io.StringIO(printed(capsys, str(run), "--csv"))))
    assert rows[0] == ["step", "layer", "head", *METRICS]
    found = [(int(s), layer, int(h), *(float(x) if x else None for x in numbers)) for s, layer, h, *numbers in rows[1:]]
    assert found == ROWS


def test_a_dash_is_the_screen(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, str(run), "--csv", "-o", "-") == printed(capsys, str(run), "--csv")
    assert not Path("-").exists()


def test_json_is_an_object_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in printed(capsys, str(run), "--json").splitlines()]
    assert [tuple(line.values()) for line in lines] == ROWS
    assert list(lines[0]) == ["step", "layer", "head", *METRICS]


def test_parquet_keeps_types(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.parquet"
    assert printed(capsys, str(run), "--parquet", "-o", str(file)) == f"{file}\n"
    table = parquet.read_table(file)
    assert [str(column.type) for column in table.schema] == ["int64", "string", "int64", "double", "double"]
    assert [tuple(row.values()) for row in table.to_pylist()] == ROWS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.parquet"]


def test_the_columns_are_those_of_the_data_frame(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows under the same names as `Run.to_pandas`."""
    frame = open_run(run).to_pandas()
    rows = list(csv.DictReader(io.StringIO(printed(capsys, str(run), "--csv"))))
    assert list(frame.columns) == list(rows[0])
    for name in frame.columns:
        column = [row[name] for row in rows]
        if name == "layer":
            assert column == frame[name].tolist()
        else:
            np.testing.assert_array_equal([float(cell or "nan") for cell in column], frame[name])


def test_infinity_is_no_missing_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that overflowed is not one that was not passed; only JSON has no number for it."""
    writer = RunWriter(tmp_path / "run", {"metrics": [], "rules": []})
    for step, loss in enumerate((2.0, float("inf"), -float("inf"), NAN)):
        writer.scalars(step, {"loss": loss})
    writer.close()
    of = (str(tmp_path / "run"), "--what", "scalars")
    assert printed(capsys, *of, "--csv").split() == ["step,loss", "0,2.0", "1,inf", "2,-inf", "3,"]
    assert [json.loads(line)["loss"] for line in printed(capsys, *of, "--json").splitlines()] == [2.0, None, None, None]
    printed(capsys, *of, "--parquet", "-o", str(tmp_path / "x"))
    assert parquet.read_table(tmp_path / "x")["loss"].to_pylist() == [2.0, float("inf"), -float("inf"), None]


def test_scalars_have_a_row_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step that was passed in two pieces there is one row; what was not passed, or is no number, is null."""
    lines = [json.loads(line) for line in printed(capsys, str(run), "--json", "--what", "scalars").splitlines()]
    assert lines == [
        {"step": 0, "loss": 2.5, "lr": None},
        {"step": 1, "loss": None, "lr": 0.1},
        {"step": 2, "loss": 2.0, "lr": 0.2},
    ]


def test_alerts_have_a_row_each(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [json.loads(line) for line in printed(capsys, str(run), "--json", "--what", "alerts").splitlines()]
    assert (line["rule"], line["fired_step"], line["resolved_step"], line["heads"]) == ("low", 10, None, "b/1 b/0")
    assert json.loads(line["values"]) == {"entropy": 0.125, "x": None}
    printed(capsys, str(run), "--parquet", "--what", "alerts", "-o", str(tmp_path / "alerts.parquet"))
    (row,) = parquet.read_table(tmp_path / "alerts.parquet").to_pylist()
    assert row == line


def test_a_run_without_anything_has_a_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunWriter(tmp_path / "empty", {"metrics": [asdict(Metric("entropy", "nat", "e", "mean"))], "rules": []}).close()
    assert printed(capsys, str(tmp_path / "empty"), "--csv") == "step,layer,head,entropy\n"
    for what in ("samples", "scalars", "alerts"):
        file = tmp_path / f"{what}.parquet"
        printed(capsys, str(tmp_path / "empty"), "--parquet", "--what", what, "-o", str(file))
        assert parquet.read_table(file).num_rows == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parquet"], "give -o FILE"),
        (["--parquet", "-o", "-"], "give -o FILE"),
        (["--csv", "-o", "run/run.json"], "expected a new file"),
        (["--csv", "-o", "nowhere/x.csv"], "expected a place to write"),
        ([], "one of the arguments --csv --json --parquet is required"),
        (["--csv", "--json"], "not allowed with"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], expected: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    try:
        code: Any = main(["export", "run", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert expected in said.err


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--csv"]) == 2
    assert "expected a run directory" in capsys.readouterr().err


LONG = """
import sys
from attnwatch.monitor.cli import main
code = main(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, peak, file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_long_run_is_not_held_in_memory(kind: str, run: Path, tmp_path: Path) -> None:
    """100,000 rows of 30 metrics: the process grows by less than they would take as Python numbers."""
    names = tuple(f"m{i}" for i in range(30))
    writer = RunWriter(tmp_path / "long", {"metrics": [asdict(Metric(n, "1", n, "mean")) for n in names], "rules": []})
    values = np.random.default_rng(0).normal(size=(30, 10, 20)).astype(np.float32)
    for step in range(500):
        writer.sample(Sample(step, 0.0, names, tuple("abcdefghij"), values))
    writer.close()
    peaks = []
    for source in (run, tmp_path / "long"):
        file = tmp_path / f"{source.name}.{kind}"
        command = [sys.executable, "-c", LONG, "export", str(source), f"--{kind}", "-o", str(file)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        code, peak = process.stderr.split()
        assert code == "0"
        peaks.append(int(peak) * 1024)
    if kind == "csv":
        with open(tmp_path / "long.csv") as text:
            assert sum(1 for _ in text) == 100_001
    else:
        assert parquet.ParquetFile(tmp_path / "long.parquet").metadata.num_rows == 100_000
    assert peaks[1] - peaks[0] < 100_000 * 30 * 32


def test_what_could_not_be_read_is_told_beside_the_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows have no place for it: a missing directory of samples and a damaged line are named on stderr."""
    shutil.rmtree(run / "samples")
    (run / "scalars.jsonl").write_text('{"step": 0, "loss": 2.5}\n{"step"\n')
    assert main(["export", str(run), "--csv", "--what", "scalars"]) == 0
    said = capsys.readouterr()
    assert said.out == "step,loss\n0,2.5\n"
    assert said.err == (
        "attnwatch: run: scalars.jsonl: line 2 is no step with its numbers, left out\n"
        "attnwatch: run: samples/: cannot be read: No such file or directory\n"
    )
    assert main(["replay", str(run)]) == 0
    assert capsys.readouterr().err == said.err
