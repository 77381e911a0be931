"""The run directory keeps what was acknowledged, says what is damaged, and never overwrites."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnwatch.monitor import store
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, UsageError
from attnwatch.monitor.store import RunWriter, StoreError, open_run

METRICS = (Metric("entropy", "nat", "mean entropy", "mean"), Metric("logit_max", "1", "largest logit", "max"))
HEADER = {"attnwatch": "0.1.0", "metrics": [vars(metric) for metric in METRICS], "rules": [{"name": "collapse"}]}
HOSTILE = ["a\nb", 'say "no"', "</script><script>", "größe 層 \U0001f4a5", "\ud800", "x" * 5000, "../../etc", ""]


def sample(step: int, layers: tuple[str, ...] = ("a",), heads: int = 1, base: float = 0.0) -> Sample:
    """Values count up from `base` in memory order: metric by metric, layer by layer, head by head."""
    values = np.arange(2 * len(layers) * heads, dtype=np.float32).reshape(2, len(layers), heads) + np.float32(base)
    return Sample(step, step + 0.5, ("entropy", "logit_max"), layers, values, 0.25)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run of the steps 1, 2, 3: one layer, one head, entropy 10, 20, 30 (so a record is 28 + 8 bytes)."""
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for step in (1, 2, 3):
            writer.sample(sample(step, base=10 * step))
    return tmp_path / "run"


def segment(run: Path, number: int = 1) -> Path:
    return run / "samples" / f"rank00000-{number:06d}.awlog"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data(), st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), st.integers(0, 3))
def test_every_value_comes_back_bit_for_bit(data: st.DataObject, shape: tuple[int, int, int], count: int) -> None:
    """NaN, infinities and subnormals too, for any number of metrics, layers and heads."""
    numbers = st.floats(width=32, allow_subnormal=True)
    names, layers = tuple(f"m{i}" for i in range(shape[0])), tuple(f"layer.{i}" for i in range(shape[1]))
    blocks = [data.draw(hnp.arrays(np.float32, shape, elements=numbers)) for _ in range(count)]
    with TemporaryDirectory() as folder:
        header = {"metrics": [{"name": name, "unit": "1", "help": "", "merge": "mean"} for name in names]}
        with closing(RunWriter(Path(folder, "run"), header)) as writer:
            for step, block in enumerate(blocks):
                writer.sample(Sample(step, step / 3, names, layers, block, step / 4))
        run = open_run(Path(folder, "run"))
        assert run.steps.tolist() == list(range(count))
        assert run.times.tolist() == [step / 3 for step in range(count)]
        assert run.seconds.tolist() == [step / 4 for step in range(count)]
        assert [metric.name for metric in run.metrics] == list(names)
        assert run.layers == (layers if count else ())
        for block, back in zip(blocks, run.iter_samples(), strict=True):
            assert (back.metrics, back.layers) == (names, layers)
            assert back.values.tobytes() == block.tobytes()
        for number, name in enumerate(names if count else ()):
            assert run.metric(name).tobytes() == np.stack([block[number] for block in blocks]).tobytes()
        assert run.problems == ()


def test_layers_and_heads_may_grow_and_the_past_is_nan(tmp_path: Path) -> None:
    """A layer first seen later, between two others, has NaN before; so has a head of a wider layer."""
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        writer.sample(sample(1, ("a", "c"), heads=1))  # entropy [[0], [1]], logit_max [[2], [3]]
        writer.sample(sample(2, ("a", "b", "c"), heads=2))  # entropy 0..5, logit_max 6..11
    run = open_run(tmp_path / "run")
    assert (run.layers, run.heads) == (("a", "b", "c"), 2)
    nan = np.nan
    expected = [[[2, nan], [nan, nan], [3, nan]], [[6, 7], [8, 9], [10, 11]]]
    np.testing.assert_array_equal(run.metric("logit_max"), np.array(expected, np.float32))
    assert [back.layers for back in run.iter_samples()] == [("a", "c"), ("a", "b", "c")]


def test_a_stranger_can_read_a_segment_from_what_run_json_says(three: Path) -> None:
    """Only numpy, zlib and the description in run.json: no code of ours."""
    layout = json.loads((three / "run.json").read_text())["layouts"][0]
    record = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in layout["record"]])
    records = np.memmap(segment(three), record, "r")
    assert records["step"].tolist() == [1, 2, 3]
    assert records["values"].tolist() == [[[[10]], [[11]]], [[[20]], [[21]]], [[[30]], [[31]]]]
    raw = segment(three).read_bytes()
    size = record.itemsize
    assert [zlib.crc32(raw[at + 8 : at + size]) for at in (0, size, 2 * size)] == records["crc32"].tolist()
    assert layout["first_segment"] == 1
    assert layout["layers"] == ["a"]


def test_segments_roll_before_they_pass_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100 bytes a segment takes two records of 36 bytes."""
    monkeypatch.setattr(store, "SEGMENT_BYTES", 100)
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for step in range(5):
            writer.sample(sample(step, base=step))
    assert [segment(tmp_path / "run", n).stat().st_size for n in (1, 2, 3)] == [72, 72, 36]
    run = open_run(tmp_path / "run")
    assert run.metric("entropy").ravel().tolist() == [0, 1, 2, 3, 4]
    assert run.problems == ()


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


def test_of_a_step_recorded_twice_the_later_one_counts(tmp_path: Path) -> None:
    """Training went back from step 3 to step 2."""
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for step, base in [(1, 10), (2, 20), (3, 30), (2, 40)]:
            writer.sample(sample(step, base=base))
            writer.scalars(step, {"loss": base})
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 2, 3]
    assert run.metric("entropy").ravel().tolist() == [10, 40, 30]
    assert [int(back["entropy"][0, 0]) for back in run.iter_samples()] == [10, 40, 30]
    steps, values = run.scalar("loss")
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [10, 40, 30])


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_scalars_come_back_also_when_not_finite(tmp_path: Path) -> None:
    """As strict JSON; a scalar that is not there at a step is absent at that step; numpy numbers are numbers."""
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        writer.scalars(1, {"loss": float("nan"), "lr": np.float32(0.5)})  # type: ignore[dict-item]
        writer.scalars(2, {"loss": float("inf"), "step": 99.0})
        writer.scalars(4, {"loss": float("-inf"), "tokens": 3})
    for line in (tmp_path / "run/scalars.jsonl").read_text().splitlines():
        strict(line)
    run = open_run(tmp_path / "run")
    assert run.scalar_names == ("loss", "lr", "tokens")
    steps, values = run.scalar("loss")
    assert steps.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(values, [np.nan, np.inf, -np.inf])
    assert [array.tolist() for array in run.scalar("lr")] == [[1], [0.5]]
    assert [array.tolist() for array in run.scalar("tokens")] == [[4], [3.0]]


def test_events_come_back_as_what_they_were(tmp_path: Path) -> None:
    """The newest state of each alert and layer, problems in order, and whether the run ended."""
    alert = Alert("collapse", "critical", "pending", "a/1", 5, None, None, float("nan"), (("a", 1),),
                  {"entropy": float("nan"), "logit_max": 50.0}, "entropy fell", "lower the lr")  # fmt: skip
    fired = {**vars(alert), "state": "firing", "fired_step": 7, "share": 0.5, "values": {"entropy": 0.125}}
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        writer.event({"event": "coverage", "step": 0, "layers": [vars(Coverage("a", "uncovered"))]})
        writer.event({"event": "alert", "step": 5, **vars(alert)})
        writer.event({"event": "problem", "step": 6, "where": "webhook", "text": "refused"})
        writer.event({"event": "alert", "step": 7, **fired})
        writer.event({"event": "alert", "step": 9, **vars(alert), "pending_step": 9})
        writer.event({"event": "coverage", "step": 9, "layers": [vars(Coverage("a", "verified", 4, 2, 8))]})
        assert not open_run(tmp_path / "run").ended
        writer.event({"event": "end", "step": 9, "time": 1.5, "samples": 2, "seconds": 0.5})
    for line in (tmp_path / "run/events.jsonl").read_text().splitlines():
        strict(line)
    run = open_run(tmp_path / "run")
    first, second = run.alerts
    assert vars(first) == {**fired, "heads": (("a", 1),)}
    assert (second.pending_step, second.state, second.values["logit_max"]) == (9, "pending", 50.0)
    assert np.isnan(second.share)
    assert np.isnan(second.values["entropy"])
    assert run.coverage == (Coverage("a", "verified", 4, 2, 8),)
    assert run.problems == (Problem(6, "webhook", "refused"),)
    assert run.ended


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


def test_hostile_names_come_back(tmp_path: Path) -> None:
    """In layers, scalars and the header."""
    layers = tuple(HOSTILE)
    with closing(RunWriter(tmp_path / "run", {**HEADER, "model": HOSTILE[2], "options": HOSTILE})) as writer:
        writer.sample(sample(1, layers, heads=2))
        writer.scalars(1, dict.fromkeys(HOSTILE, 2.5))
    run = open_run(tmp_path / "run")
    assert run.layers == layers
    assert run.scalar_names == layers
    assert run.header["options"] == HOSTILE
    assert run.metric("entropy")[0, 3].tolist() == [6, 7]
    assert run.problems == ()


def test_the_header_comes_back(tmp_path: Path) -> None:
    """Before the first sample too; non-finite options are null; run.json itself may be given."""
    with closing(RunWriter(tmp_path / "deep/run", {**HEADER, "options": {"context": float("nan")}})):
        run = open_run(tmp_path / "deep/run/run.json")
    assert run.path == tmp_path / "deep/run"
    assert run.metrics == METRICS
    assert run.rules == ({"name": "collapse"},)
    assert run.header["attnwatch"] == "0.1.0"
    assert run.header["options"] == {"context": None}
    assert (run.layers, run.heads, run.steps.tolist(), list(run.iter_samples())) == ((), 0, [], [])
    assert run.metric("entropy").shape == (0, 0, 0)
    assert not (tmp_path / "deep/run/run.json.tmp").exists()


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """UsageError of one line that holds every part."""
    with pytest.raises(UsageError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("expected ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", ["run.json", "scalars.jsonl", "events.jsonl", "samples"])
def test_recorded_data_is_never_overwritten(tmp_path: Path, name: str) -> None:
    """Anything of a run that is already there stays as it is."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("precious")
    with refused(name, "pass another run="):
        RunWriter(tmp_path / "run", HEADER)
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_a_second_writer_of_the_same_run_is_refused(three: Path) -> None:
    before = segment(three).read_bytes()
    with refused("run.json", "pass another run="):
        RunWriter(three, HEADER)
    assert segment(three).read_bytes() == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file in the way, a path below a file, a name that no file system takes. An empty directory will do."""
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / "file/run", tmp_path / ("x" * 300)):
        with refused("expected a new or empty directory", "pass another run="):
            RunWriter(path, HEADER)
    assert (tmp_path / "file").read_text() == "precious"
    (tmp_path / "empty\nname").mkdir()
    RunWriter(tmp_path / "empty\nname", HEADER).close()
    with refused("run.json"):
        RunWriter(tmp_path / "empty\nname", HEADER)


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


def test_unknown_names_are_answered_with_the_known_ones(three: Path) -> None:
    run = open_run(three)
    with refused("'entropi'", "entropy, logit_max"):
        run.metric("entropi")
    with refused("'loss'", "none"):
        run.scalar("loss")


def test_a_sample_of_other_metrics_or_another_shape_is_refused(tmp_path: Path) -> None:
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        good = sample(1, ("a", "b"), heads=2)
        with refused("metrics of run.json"):
            writer.sample(Sample(1, 1.0, ("entropy",), good.layers, good.values[:1]))
        with refused("[2, 1, 2]", "[2, 2, 2]"):
            writer.sample(Sample(1, 1.0, good.metrics, ("a",), good.values))
        writer.sample(good)
    assert open_run(tmp_path / "run").steps.tolist() == [1]


def test_closing_twice_is_once_and_writing_after_is_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.close()
    writer.close()
    with refused("write before close()"):
        writer.sample(sample(1))
    with refused("write before close()"):
        writer.scalars(1, {})
    with refused("write before close()"):
        writer.event({"event": "end"})


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
        assert writer.lost == 2
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
    assert writer.lost == 1
    writer.close()
