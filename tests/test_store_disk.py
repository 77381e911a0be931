"""Real processes that are killed, are read meanwhile, or meet a disk that refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.made_records import HEADER, sample

from attnwatch.monitor.sample import Problem
from attnwatch.monitor.store import RunWriter, StoreError, open_run

WRITER = """
import sys
import numpy as np
from attnwatch.monitor.sample import Sample
from attnwatch.monitor.store import RunWriter, StoreError

def sample(step, layers=("a",), heads=1):
    values = np.full((2, len(layers), heads), step, np.float32)
    return Sample(step, float(step), ("entropy", "logit_max"), layers, values)

metrics = [{"name": name, "unit": "1", "help": "", "merge": "mean"} for name in ("entropy", "logit_max")]
writer = RunWriter(sys.argv[1], {"metrics": metrics})
"""


@contextmanager
def process(body: str, run: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process that has made a RunWriter at `run`, and goes on with `body`."""
    script = WRITER + textwrap.dedent(body)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, run], stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """The process is killed while it writes as fast as it can."""
    body = """
        for step in range(1_000_000):
            writer.sample(sample(step, ("a", "b"), heads=64))
            writer.scalars(step, {"loss": step})
            print(step, flush=True)
    """
    with process(body, tmp_path / "run") as child:
        assert child.stdout is not None
        for _ in range(300):
            acknowledged = int(child.stdout.readline())
        child.kill()
        rest = child.stdout.read().split("\n")[:-1]  # whole lines only
        acknowledged = int(rest[-1]) if rest else acknowledged
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(len(run.steps)))
    assert len(run.steps) in (acknowledged + 1, acknowledged + 2)
    assert run.scalar("loss")[0].tolist()[: acknowledged + 1] == list(range(acknowledged + 1))
    np.testing.assert_array_equal(run.metric("entropy")[:, 1, 63], run.steps)
    assert not run.ended


def test_a_reader_follows_a_live_writer(tmp_path: Path) -> None:
    """After each acknowledgement a new opening shows just what was written, over a new layer too."""
    body = """
        print("ready", flush=True)
        for line in sys.stdin:
            step = int(line)
            writer.sample(sample(step, ("a",) if step < 3 else ("a", "b")))
            writer.scalars(step, {"loss": step / 2})
            print(step, flush=True)
        writer.event({"event": "end", "step": step, "time": 0.0, "samples": 4, "seconds": 0.0})
        writer.close()
        print("closed", flush=True)
    """
    with process(body, tmp_path / "run") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for step in (1, 2, 3, 4):
            child.stdin.write(f"{step}\n")
            child.stdin.flush()
            assert child.stdout.readline() == f"{step}\n"
            run = open_run(tmp_path / "run")
            assert run.steps.tolist() == list(range(1, step + 1))
            assert run.layers == (("a",) if step < 3 else ("a", "b"))
            assert run.metric("entropy")[-1].tolist() == [[step]] * len(run.layers)
            assert run.scalar("loss")[1][-1] == step / 2
            assert run.problems == ()
            assert not run.ended
        child.stdin.close()
        assert child.stdout.readline() == "closed\n"
    assert open_run(tmp_path / "run").ended


def ran(body: str, run: Path) -> str:
    with process(body, run) as child:
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 0
    return output


LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def attempt(call, *arguments):
    try:
        call(*arguments)
        print("taken")
    except StoreError as error:
        assert "\\n" not in str(error)
        print(error)
"""


def test_a_sample_the_disk_refuses_is_lost_alone(tmp_path: Path) -> None:
    """A file may hold two records and a half: the third is cut off, and the fourth goes to a new segment."""
    body = """
        limit(5 * (28 + 2 * 4 * 64 * 4) // 2)
        for step in range(1, 7):
            attempt(writer.sample, sample(step, ("a", "b", "c", "d"), heads=64))
        assert writer.lost == {"samples": 2}
        limit(resource.RLIM_INFINITY)
        writer.close()
    """
    lines = ran(LIMIT + textwrap.dedent(body), tmp_path / "run").splitlines()
    assert [line == "taken" for line in lines] == [True, True, False, True, True, False]
    assert "sample of step 3 lost: No space left on device (1038 of 2076 bytes taken)" in lines[2]
    sizes = [path.stat().st_size for path in sorted((tmp_path / "run/samples").iterdir())]
    assert sizes == [2 * 2076, 2 * 2076]
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 2, 4, 5]
    assert run.metric("entropy")[:, 3, 63].tolist() == [1, 2, 4, 5]
    assert run.problems == ()


def test_a_full_disk_leaves_no_trail_of_empty_segments(tmp_path: Path) -> None:
    """Not one record fits, ten times; then there is room again, and the next sample takes the same file."""
    body = """
        limit(1500)
        for step in range(1, 11):
            attempt(writer.sample, sample(step, ("a",), heads=200))
        limit(resource.RLIM_INFINITY)
        attempt(writer.sample, sample(11, ("a",), heads=200))
        writer.close()
    """
    lines = ran(LIMIT + textwrap.dedent(body), tmp_path / "run").splitlines()
    assert [line == "taken" for line in lines] == [False] * 10 + [True]
    assert [path.name for path in (tmp_path / "run/samples").iterdir()] == ["rank00000-000001.awlog"]
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [11]
    assert run.problems == ()


def test_a_layout_the_disk_refuses_leaves_the_old_run_json(tmp_path: Path) -> None:
    """The new run.json does not fit: the old one stays whole, and what was written can be read."""
    body = """
        writer.sample(sample(1))
        limit(600)
        attempt(writer.sample, sample(2, ("a", "b" * 1000)))
        limit(resource.RLIM_INFINITY)
        attempt(writer.sample, sample(3, ("a", "b" * 1000)))
        writer.close()
    """
    lines = ran(LIMIT + textwrap.dedent(body), tmp_path / "run").splitlines()
    assert "sample of step 2 lost" in lines[0]
    assert lines[1:] == ["taken"]
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 3]
    assert run.problems == ()
    assert not (tmp_path / "run/run.json.tmp").exists()


def test_a_line_the_disk_refuses_is_lost_alone(tmp_path: Path) -> None:
    """Lines before and after it stay whole."""
    body = """
        attempt(writer.scalars, 1, {"loss": 1.0})
        limit(40)
        attempt(writer.scalars, 2, {"loss": 2.0})
        attempt(writer.event, {"event": "problem", "step": 2, "where": "x" * 100, "text": ""})
        limit(resource.RLIM_INFINITY)
        attempt(writer.scalars, 3, {"loss": 3.0})
        attempt(writer.event, {"event": "problem", "step": 3, "where": "y", "text": ""})
        writer.close()
    """
    lines = ran(LIMIT + textwrap.dedent(body), tmp_path / "run").splitlines()
    assert [line == "taken" for line in lines] == [True, False, False, True, True]
    assert "a line of scalars.jsonl lost: No space left on device" in lines[1]
    run = open_run(tmp_path / "run")
    assert run.scalar("loss")[0].tolist() == [1, 3]
    assert run.problems == (Problem(3, "y", ""),)


def test_a_directory_that_vanished_is_one_line(tmp_path: Path) -> None:
    """Somebody removed the run while it was written: StoreError for what needs a new file, never anything else."""
    writer = RunWriter(tmp_path / "run", HEADER)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match=f"sample of step 1 lost: {os.strerror(2)}") as caught:
        writer.sample(sample(1))
    assert "\n" not in str(caught.value)
    assert writer.lost["samples"] == 1
    writer.close()
