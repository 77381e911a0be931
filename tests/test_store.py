"""What was written to a run directory comes back as it was, and wrong use is refused."""

from __future__ import annotations

import json
import zlib
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.made_records import HEADER, METRICS, refused, run_of_three, sample, segment

from attnwatch.monitor import store
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.sample import Coverage, Problem, Sample
from attnwatch.monitor.store import RunWriter, open_run

HOSTILE = ["a\nb", 'say "no"', "</script><script>", "größe 層 \U0001f4a5", "\ud800", "x" * 5000, "../../etc", ""]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return run_of_three(tmp_path / "run")


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
