"""A long run in less room: what stays, what the envelope says, and that it is said."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tests.made_records import HEADER, METRICS, refused, sample
from tests.made_runs import alert

from attnwatch.monitor.cli import main
from attnwatch.monitor.replay import replay
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Metric, Sample
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.monitor.thin import Thinned, kept, thin
from attnwatch.reports.every import _read
from attnwatch.reports.facts import Cost, cost
from attnwatch.reports.panels import Detail

NAMES = tuple(metric.name for metric in METRICS)
NAN = np.float32(np.nan)


def write(path: Path, values: np.ndarray, *, every: int = 10) -> Run:
    """values: `[S, M, L, H]` of the metrics entropy and logit_max; a sample every tenth step, a loss at each sample."""
    layers = tuple(f"h.{index}" for index in range(values.shape[2]))
    with closing(RunWriter(path, HEADER)) as writer:
        for index, block in enumerate(values.astype(np.float32)):
            writer.sample(Sample(every * index, float(index), NAMES, layers, block))
            writer.scalars(every * index, {"loss": index / 7})
    return open_run(path)


def test_of_each_group_one_sample_stays_and_the_envelope_covers_all(tmp_path: Path) -> None:
    """Eight samples, groups of three between the first and the last; entropy 5 1 4 | 9 2 (one head, worked by hand)."""
    entropy = [0, 5, 1, 4, 9, 2, 8, 7]
    run = write(tmp_path / "run", np.array([[[[x]], [[-x]]] for x in entropy]))
    assert thin(run, tmp_path / "thin", every=3, around=1) == Thinned(4, 8)
    thinned = open_run(tmp_path / "thin")
    assert thinned.steps.tolist() == [0, 30, 60, 70]
    assert thinned.metric("entropy").ravel().tolist() == [0, 4, 8, 7]
    low, high = thinned.envelope("entropy")
    assert (low.ravel().tolist(), high.ravel().tolist()) == ([0, 1, 2, 7], [0, 5, 9, 7])
    low, high = thinned.envelope("logit_max")
    assert (low.ravel().tolist(), high.ravel().tolist()) == ([0, -5, -9, -7], [0, -1, -2, -7])
    assert [bound.ravel().tolist() for bound in run.envelope("entropy")] == [entropy, entropy]
    with refused("found 'nonsense'"):
        thinned.envelope("nonsense")


def test_what_sampling_has_cost_stays_what_it_was(tmp_path: Path) -> None:
    """Twenty samples of half a second, ten seconds apart; the first was taken before its time: 9.5 of 190 seconds."""
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for index in range(20):
            block = np.full((2, 1, 1), index, np.float32)
            writer.sample(Sample(index, 10.0 * index, NAMES, ("h",), block, 0.5))
    assert cost(open_run(tmp_path / "run")) == Cost(20, 10.0, 0.05)
    thin(open_run(tmp_path / "run"), tmp_path / "thin", every=5, around=1)
    assert len(open_run(tmp_path / "thin").steps) < 10
    assert cost(open_run(tmp_path / "thin")) == Cost(20, 10.0, 0.05)


def test_a_page_draws_the_range_of_what_was_left_out(tmp_path: Path) -> None:
    """The ninth of twenty samples is a peak of its group that does not stay; without the envelope it is not known."""
    entropy = np.ones(20)
    entropy[8] = 9.0
    thin(write(tmp_path / "run", np.array([[[[x]], [[-x]]] for x in entropy])), tmp_path / "thin", every=6, around=1)
    thinned = open_run(tmp_path / "thin")
    assert 9.0 not in thinned.metric("entropy")

    def highest() -> float:
        return float(_read(thinned, Detail(100, 8), {"entropy": [0], "logit_max": [0]})["entropy"].reduced.high.max())

    assert highest() == 9.0
    shutil.rmtree(tmp_path / "thin" / "highest")
    assert highest() == 1.0


def test_the_sample_that_measured_most_stays_and_missing_is_no_extreme(tmp_path: Path) -> None:
    """The second of three has both metrics; entropy was not measured in the third, the other head never."""
    values = np.full((3, 2, 1, 2), NAN)
    values[:, 0, 0, 0] = [3, 2, NAN]
    values[1, 1, 0, 0] = -np.inf
    values[2, 1, 0, 0] = 6
    run = write(tmp_path / "run", values)
    assert thin(run, tmp_path / "thin", every=3, around=0) == Thinned(1, 3)
    thinned = open_run(tmp_path / "thin")
    assert thinned.steps.tolist() == [10]
    low, high = (bound.ravel() for bound in thinned.envelope("logit_max"))
    assert (low[0], high[0], np.isnan(low[1]), np.isnan(high[1])) == (-np.inf, 6, True, True)
    low, high = (bound.ravel() for bound in thinned.envelope("entropy"))
    assert (low[0], high[0]) == (2, 3)


def test_an_envelope_is_that_of_every_group_whatever_layers_come_and_heads(tmp_path: Path) -> None:
    """Against the groups by hand: those of another layer or width are groups of their own."""
    rng = np.random.default_rng(0)
    shapes = [(("a",), 2)] * 5 + [(("a", "b"), 2)] * 4 + [(("b", "a"), 3)] * 6
    taken = []
    with closing(RunWriter(tmp_path / "run", HEADER)) as writer:
        for step, (layers, heads) in enumerate(shapes):
            values = np.round(rng.random((2, len(layers), heads), np.float32), 3)
            taken.append(Sample(step, 0.0, NAMES, layers, values))
            writer.sample(taken[-1])
    thin(open_run(tmp_path / "run"), tmp_path / "thin", every=4, around=0)
    thinned = open_run(tmp_path / "thin")
    groups = [(0, 4), (4, 5), (5, 9), (9, 13), (13, 15)]
    assert thinned.steps.tolist() == [last - 1 for _, last in groups]
    for name, index in (("entropy", 0), ("logit_max", 1)):
        for bound, pick in zip(thinned.envelope(name), (np.min, np.max), strict=True):
            expected = np.full((len(groups), 2, 3), NAN)
            for number, (first, last) in enumerate(groups):
                for place, layer in enumerate(taken[first].layers):
                    group = np.stack([each.values[index, place] for each in taken[first:last]])
                    expected[number, thinned.layers.index(layer), : group.shape[1]] = pick(group, 0)
            np.testing.assert_array_equal(bound, expected)


def test_everything_around_an_alert_stays_and_the_ends(tmp_path: Path) -> None:
    """Pending at step 300, firing at 340, resolved at 700, with a sample every tenth step and two on either side."""
    run = write(tmp_path / "run", np.zeros((100, 2, 1, 1)))
    run.alerts = (alert(pending_step=300, fired_step=340, resolved_step=700),)
    stays = [*range(2), *range(28, 37), *range(68, 73), 98, 99]
    assert np.flatnonzero(kept(run, 2)).tolist() == stays
    run.alerts = (alert(pending_step=985, fired_step=990, resolved_step=None),)
    assert np.flatnonzero(kept(run, 2)).tolist() == [0, 1, 97, 98, 99]


def test_scalars_events_and_what_the_run_was_are_kept_and_what_was_done_is_said(tmp_path: Path) -> None:
    """Also of a run that was killed: the torn ends of its lines are left behind."""
    write(tmp_path / "run", np.random.default_rng(0).random((500, 2, 1, 1)))
    fired = {"event": "alert", "step": 2000, **asdict(alert(pending_step=1990, fired_step=2000, resolved_step=None))}
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write(f'{json.dumps(fired)}\n{{"event": "pro')
    with (tmp_path / "run/scalars.jsonl").open("a") as scalars:
        scalars.write('{"step": 50')
    run = open_run(tmp_path / "run")
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    done = thin(run, tmp_path / "thin", every=10, around=20)
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before
    thinned = open_run(tmp_path / "thin")
    assert (thinned.alerts, thinned.metrics, thinned.rules) == (run.alerts, run.metrics, run.rules)
    assert np.array_equal(thinned.scalar("loss"), run.scalar("loss"))
    assert thinned.header["thinned"] == {"every": 10, "around": 20, "samples": 500, "seconds": 0.0}
    (problem,) = thinned.problems
    assert (problem.where, problem.step) == ("samples", 4990)
    assert problem.text.startswith(f"thinned: {done.kept} of 500 samples are kept, one of 10 except for 20 on both ")
    rows = np.flatnonzero(np.isin(run.steps, thinned.steps))
    assert len(rows) == done.kept == len(thinned.steps)
    assert np.array_equal(thinned.metric("entropy"), run.metric("entropy")[rows])
    assert set(range(179, 221)) <= set(rows)


def test_a_thinned_run_is_neither_replayed_nor_thinned_again(tmp_path: Path) -> None:
    """Rules count samples: what would have fired cannot be told from a tenth of them."""
    thin(write(tmp_path / "run", np.zeros((9, 2, 1, 1))), tmp_path / "thin", every=3, around=1)
    thinned = open_run(tmp_path / "thin")
    with refused("a run with all its samples", "thinned: rules count samples"):
        replay(thinned, ())
    with refused("thinned already"):
        thin(thinned, tmp_path / "again", every=3, around=1)
    assert not (tmp_path / "again").exists()


def test_the_command_copies_and_never_over_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", np.zeros((50, 2, 1, 1)))
    command = ["thin", str(run.path), "-o", str(tmp_path / "thin"), "--every", "5", "--around", "5"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'thin'}: 18 of 50 samples\n"
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("attnwatch: expected a new directory, found ")
    assert main(["thin", str(run.path), "-o", str(tmp_path / "no/where"), "--every", "5"]) == 0
    for wrong in ("0", "x", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--every", wrong])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["no", "run", "thin"]


def test_what_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    for name in ("scalars.jsonl", "events.jsonl"):
        run = write(tmp_path / "run", np.zeros((5, 2, 1, 1)))
        (run.path / name).unlink()
        with refused(f"expected {name} in the run", "No such file", "restore it"):
            thin(run, tmp_path / "thin", every=2, around=1)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        shutil.rmtree(run.path)


FULL = """
import resource, signal, sys
from attnwatch.monitor.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(["thin", *sys.argv[2:]]))
"""


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path through a file, and disks that take nothing or not all: one line, without the name of the scratch
    directory, and nothing left behind."""
    run = write(tmp_path / "run", np.zeros((50, 2, 4, 8)))
    (tmp_path / "file").touch()
    assert main(["thin", str(run.path), "-o", str(tmp_path / "file/thin")]) == 2
    said = [capsys.readouterr().err]
    for room in ("20", "4000"):
        command = [sys.executable, "-c", FULL, room, str(run.path), "-o", str(tmp_path / "thin")]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=60).stderr)
    for line, place, why in zip(
        said, ("file/thin", "thin", "thin"), ("Not a dir", "File too", "No space"), strict=True
    ):
        assert line.startswith(f"attnwatch: expected room for the copy, found {str(tmp_path / place)!r} ({why}")
        assert line.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_the_copy_says_which_samples_were_damaged(tmp_path: Path) -> None:
    run = write(tmp_path / "run", np.zeros((20, 2, 1, 1)))
    (segment,) = (run.path / "samples").iterdir()
    content = bytearray(segment.read_bytes())
    content[7 * len(content) // 20 - 1] ^= 1  # the last byte of the seventh sample
    segment.write_bytes(content)
    thin(open_run(run.path), tmp_path / "thin", every=5, around=1)
    damaged, thinned = open_run(tmp_path / "thin").problems
    assert (damaged.where, thinned.where) == (f"samples/{segment.name}", "samples")
    assert damaged.text == "record 7 of 20 is damaged (checksum) and left out"


def test_a_metric_that_is_only_in_some_samples_keeps_its_points(tmp_path: Path) -> None:
    """The spectrum is measured in every fifth sample: of a group of five that one stays."""
    metrics = (*METRICS, Metric("qk_rank", "1", "", "last"))
    with closing(RunWriter(tmp_path / "run", {"metrics": [vars(metric) for metric in metrics]})) as writer:
        for step in range(20):
            block = np.concatenate([sample(step).values, [[[step if step % 5 == 0 else NAN]]]]).astype(np.float32)
            writer.sample(Sample(step, 0.0, (*NAMES, "qk_rank"), ("a",), block))
    thin(open_run(tmp_path / "run"), tmp_path / "thin", every=5, around=0)
    assert open_run(tmp_path / "thin").metric("qk_rank").ravel().tolist() == [0, 5, 10, 15]
