"""Whatever happened to the files of a run, what can be read is read, and what cannot is named or refused."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.made_records import HEADER, refused, run_of_three, sample, segment

from attnwatch.monitor import lines, store
from attnwatch.monitor.store import RunWriter, open_run


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return run_of_three(tmp_path / "run")


def test_a_torn_tail_is_cut_at_the_last_whole_record(three: Path) -> None:
    """Wherever in the last record the write stopped. It may be growing just now, so it is no problem."""
    whole = segment(three).read_bytes()
    for length in range(72, 108):
        segment(three).write_bytes(whole[:length])
        run = open_run(three)
        assert run.steps.tolist() == [1, 2]
        assert run.metric("entropy").ravel().tolist() == [10, 20]
        assert run.problems == ()


def test_a_flipped_bit_costs_its_record_and_is_named(three: Path) -> None:
    """Whichever byte of the record in the middle it hits."""
    whole = segment(three).read_bytes()
    for at in range(36, 72):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        segment(three).write_bytes(damaged)
        run = open_run(three)
        assert run.steps.tolist() == [1, 3]
        assert run.metric("entropy").ravel().tolist() == [10, 30]
        (problem,) = run.problems
        assert problem.where == "samples/rank00000-000001.awlog"
        assert "record 2 of 3 is damaged" in problem.text
        assert problem.step == 1


def test_damage_in_an_older_segment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one, and a tail that nobody will complete."""
    monkeypatch.setattr(store, "SEGMENT_BYTES", 36)
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for step in range(4):
            writer.sample(sample(step))
    segment(tmp_path / "run", 1).write_bytes(segment(tmp_path / "run", 1).read_bytes() + b"torn")
    segment(tmp_path / "run", 3).unlink()
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 3]
    assert [(p.step, p.where, p.text) for p in run.problems] == [
        (0, "samples/rank00000-000001.awlog", "4 bytes at its end are no record"),
        (1, "samples/rank00000-000003.awlog", "is missing"),
    ]


def test_a_torn_last_line_is_ignored_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    """Wherever the write of the last line stopped."""
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for step in (1, 2, 3):
            writer.scalars(step, {"loss": step})
            writer.event({"event": "problem", "step": step, "where": "x", "text": "y"})
    for name in ("scalars.jsonl", "events.jsonl"):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        first, second, third = whole.splitlines(keepends=True)
        for length in range(len(third)):
            path.write_bytes(first + second + third[:length])
            run = open_run(tmp_path / "run")
            assert len(run.problems) == (2 if name == "events.jsonl" else 3)  # those recorded, none of ours
            if name == "scalars.jsonl":
                assert run.scalar("loss")[0].tolist() == [1, 2]
        for damage in (
            second[:-2] + b"\n",
            b"[]\n",
            b"7\n",
            b"\xff\n",
            b'{"step": null}\n',
            b"\n",
            b"[" * 9999 + b"\n",
        ):
            path.write_bytes(first + damage + third)
            named = [problem for problem in open_run(tmp_path / "run").problems if problem.where == name]
            assert [problem.step for problem in named] == [1]
            assert "line 2" in named[0].text
        path.write_bytes(whole)
    (tmp_path / "run/scalars.jsonl").unlink()
    assert open_run(tmp_path / "run").problems[-1].where == "scalars.jsonl"


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(three: Path) -> None:
    """Somebody would have to write into it. What is beside it can be read."""
    for file in (three / "scalars.jsonl", three / "events.jsonl", segment(three)):
        file.unlink()
        os.mkfifo(file)
    run = open_run(three)
    assert [(problem.where, problem.text) for problem in run.problems] == [
        ("samples/rank00000-000001.awlog", "cannot be read: no ordinary file"),
        ("scalars.jsonl", "cannot be read: no ordinary file"),
        ("events.jsonl", "cannot be read: no ordinary file"),
    ]
    assert (run.steps.tolist(), run.metrics[0].name) == ([], "entropy")


def test_lines_are_read_alike_wherever_a_piece_of_the_file_ends(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good lines, damaged ones, two on one line, one on two, a name that comes and goes, the newest step last."""
    text = (
        b'{"step": 1, "loss": 0.5, "lr": 1}\n{"step": 2, "loss": "NaN"}\n'
        b'{"step": 3, "loss": 1},{"step": 3}\n{"step": 4, "loss":\n 9}\n{"step": 5, "loss": null}\n'
        b'{"step": 6, "loss": 6.5}\n{"step": 2, "loss": "Infinity", "lr": 3}\n{"step": 7, "lo'
    )
    (three / "scalars.jsonl").write_bytes(text)
    for piece in (*range(1, 60), len(text), 1 << 20):
        monkeypatch.setattr(lines, "PIECE", piece)
        run = open_run(three)
        assert [problem.text.split(" is ")[0] for problem in run.problems] == ["line 3", "line 4", "line 5", "line 6"]
        assert [problem.step for problem in run.problems] == [2, 2, 2, 2]
        assert run.scalar_names == ("loss", "lr")
        assert run.scalar("loss")[0].tolist() == [1, 2, 6]
        assert run.scalar("loss")[1].tolist() == [0.5, np.inf, 6.5]
        assert [column.tolist() for column in run.scalar("lr")] == [[1, 2], [1.0, 3.0]]
        assert [step for step, _ in run.iter_scalars()] == [1, 2, 6, 2]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "folder").mkdir()
    with refused("found nothing", "give the directory"):
        open_run(tmp_path / "missing")
    with refused("found nothing"):
        open_run(tmp_path / "missing/run.json")
    with refused("found a file"):
        open_run(tmp_path / "file")
    with refused("without run.json"):
        open_run(tmp_path / "folder")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/run.json")
    with refused("no ordinary file"):
        open_run(tmp_path / "pipe")
    (tmp_path / "folder/run.json").mkdir()
    with refused("Is a directory"):
        open_run(tmp_path / "folder")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Expecting value"),
        ('{"format": 1', "delimiter"),
        ("[]", "no format number"),
        ("{}", "no format number"),
        ('{"format": 2}', "found format 2; upgrade attnwatch"),
        ('{"format": 1}', "metrics"),
        ('{"format": 1, "metrics": [{"name": "entropy"}], "layouts": []}', "merge"),
        ('{"format": 1, "metrics": 7, "layouts": []}', "int"),
        ('{"format": 1, "metrics": [], "layouts": [{}]}', "first_segment"),
        ('{"format": 1, "metrics": [], "layouts": [{"first_segment": 1, "layers": ["a"], "heads": -1}]}', "ValueError"),
        ('{"format": 1, "metrics": [], "layouts": [{"first_segment": 1, "layers": ["a"], "heads": "x"}]}', "literal"),
        ("[" * 99999, "recursion"),
        ("\0\0\0\0", "Expecting value"),
    ],
)
def test_a_damaged_or_newer_run_json_is_refused(three: Path, text: str, found: str) -> None:
    (three / "run.json").write_text(text)
    with refused(found):
        open_run(three)
