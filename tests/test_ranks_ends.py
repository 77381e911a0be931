"""Ranks that leave, fail, stop or die: the others go on, whoever they are, and say what happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests import ranks_ends
from tests.gang import gang
from tests.ranks_decoder import decoder
from torch.testing._internal.distributed.fake_pg import FakeStore

import attnwatch
from attnwatch import UsageError
from attnwatch.hooks import ranks
from attnwatch.monitor.paths import open_runs

LAYERS = ("blocks.0.attention", "blocks.1.attention")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pair of processes that lived through everything, and was killed at last."""
    place = tmp_path_factory.mktemp("ends")
    names = [end.__name__ for end in ranks_ends.ENDS]
    assert names[-1] == "dies"
    gang("ranks_ends.py", 2, str(place), *names, codes=(0, -signal.SIGKILL))
    return place


def told(ended: Path, name: str) -> list[dict[str, Any]]:
    """What the ranks said that lived."""
    return [json.loads(path.read_text()) for path in sorted(ended.glob(f"{name}-[01].json"))]


def problems(ended: Path, name: str) -> list[tuple[str, str]]:
    return [(problem.where, problem.text) for problem in attnwatch.open_run(ended / name).problems]


def test_a_rank_that_cannot_measure_holds_up_nobody(ended: Path) -> None:
    """Its failure reaches the run by name, and every step is sampled: by the other rank alone where it failed."""
    run = attnwatch.open_run(ended / "fails")
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert run.layers == LAYERS
    assert not np.isnan(run.metric("entropy")).any()
    found = problems(ended, "fails")
    assert ("sample", "rank 1: ZeroDivisionError: division by zero") in found
    assert ("hooks", "rank 1: ZeroDivisionError: division by zero") in found


def test_a_rank_that_leaves_is_named_and_rank_0_goes_on(ended: Path) -> None:
    run = attnwatch.open_run(ended / "leaves")
    assert run.steps.tolist() == [0, 1, 2, 3]
    left = "ranks are not merged any more: rank 1 closed its monitor; this run holds what rank 0 sees"
    assert problems(ended, "leaves") == [("ranks", left)]
    assert [rank["last"] for rank in told(ended, "leaves")] == [3, 1]


def test_a_rank_that_never_watched_is_named(ended: Path) -> None:
    """Rank 0 records in the run it was given, as if it were alone."""
    run = attnwatch.open_run(ended / "stays_away")
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert [text for _, text in problems(ended, "stays_away")] == [
        "ranks are not merged: rank 1 did not call attnwatch.watch for this run; this run holds what rank 0 sees"
    ]


def test_another_rank_than_0_records_beside_the_run_when_it_is_alone(ended: Path) -> None:
    assert not (ended / "first_stays_away").exists()
    run = attnwatch.open_run(ended / "first_stays_away-rank00001")
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert told(ended, "first_stays_away")[1]["run"] == "first_stays_away-rank00001"


def test_patience_ends(ended: Path) -> None:
    """A rank that calls `step` no more is waited for once, and named."""
    run = attnwatch.open_run(ended / "falls_silent")
    assert run.steps.tolist() == [0, 1, 2]
    ((_, text),) = problems(ended, "falls_silent")
    assert "rank 1 did not come to the sample of step 1 within 1 s" in text


def test_who_waits_hears_ctrl_c(ended: Path) -> None:
    """And not only when its patience ends; the rank that was waited for goes on and is told."""
    first, second = told(ended, "is_interrupted")
    assert 1 < first["waited"] < 30
    assert first["problems"] == []
    left = "ranks are not merged any more: rank 0 closed its monitor; nothing more is measured here"
    assert second["problems"] == [["ranks", left]]


def test_a_rank_without_data_leaves_in_the_middle_of_a_join(ended: Path) -> None:
    """Told at once: nobody's patience is tried."""
    assert attnwatch.open_run(ended / "joins").steps.tolist() == [0, 1, 2, 3]
    left = "ranks are not merged any more: rank 1 closed its monitor; this run holds what rank 0 sees"
    assert problems(ended, "joins") == [("ranks", left)]
    assert all(rank["seconds"] < 60 for rank in told(ended, "joins"))


def test_ranks_that_see_no_attention_say_why(ended: Path) -> None:
    why = "no attention call was seen in this step: the model is in eval mode (call model.train() for training steps)"
    assert problems(ended, "sees_nothing") == [("model", why), ("model", f"rank 1: {why}")]


def test_a_rank_without_attention_is_one_of_them(ended: Path) -> None:
    """Its loss is the run's, and nothing is said of it."""
    run = attnwatch.open_run(ended / "holds_none")
    assert run.layers == LAYERS
    assert run.steps.tolist() == [0, 1]
    assert run.scalar("loss")[0].tolist() == [0, 1]
    assert problems(ended, "holds_none") == []


def test_a_rank_waits_half_as_long_as_training_would(tmp_path: Path) -> None:
    """Its own collectives must not give up first."""
    script = f"""
import datetime
import torch.distributed as dist
from attnwatch.hooks.ranks import PATIENCE, Ranks
for seconds, patience in ((20, 10), (1000, PATIENCE)):
    wait = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method="file://{tmp_path}/%d" % seconds, rank=0, world_size=1, timeout=wait)
    assert Ranks("run")._patience == patience
    dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_entries_of_ended_processes_are_not_taken_for_those_of_other_ranks(tmp_path: Path) -> None:
    """torchrun keeps its store when it starts processes anew. A rank that is new there hears it from another one."""
    script = f"""
import sys
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from attnwatch.hooks.ranks import Ranks
rank, store = int(sys.argv[1]), dist.FileStore("{tmp_path}/store", -1)
dist.init_process_group("fake", store=store, rank=rank, world_size=2)
ranks = [Ranks("one"), Ranks("two"), Ranks("one")]
print(ranks[0]._store.get("0/door").decode() if rank else "new")
"""
    lives = [
        subprocess.run([sys.executable, "-c", script, rank], timeout=120, capture_output=True, text=True)
        for rank in ("0", "0", "1")
    ]
    assert [life.stdout.strip() for life in lives] == ["new", "", ranks.OUTLIVED]
    assert lives[1].stderr.strip().endswith(f"RuntimeError: {ranks.OUTLIVED}")


def test_what_many_ranks_say_is_one_problem() -> None:
    """Of 1,024 ranks: the run has room for a thousand."""
    same, own = ("blocks.0", "gave nothing"), ("sample", "no memory")
    problems = ranks._of_others({rank: [same, own] if rank == 7 else [same] for rank in range(1, 1024)})
    assert problems == [
        ("blocks.0", "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1015 more: gave nothing"),
        ("sample", "rank 7: no memory"),
    ]


def test_all_ranks_stop_at_the_same_step(ended: Path) -> None:
    """Rank 0 sees the scalar at step 3, between two samples; all of them hear of it with the sample of step 4."""
    for rank in told(ended, "stops"):
        assert (rank["done"], rank["stopped"], rank["alerts"]) == (4, "late", ["late"])
    assert attnwatch.open_run(ended / "stops").alerts[0].fired_step == 3


def test_no_rank_stops_alone(ended: Path) -> None:
    """The others would wait for it in training's collectives."""
    mine, other = told(ended, "cannot_stop")
    assert (mine["done"], mine["alerts"], other["done"]) == (3, ["late"], 3)
    (problem,) = problems(ended, "cannot_stop")
    assert problem[1].endswith("; stop_on is off: a rank that stops alone holds up the others")
    assert mine["refused"].startswith('expected no stop_on= with merge="none", found one')


def test_without_merging_every_rank_records_for_itself(ended: Path) -> None:
    """And waits for nobody: rank 1 trains for half as long."""
    runs = [attnwatch.open_run(ended / "apart" / f"rank0000{rank}") for rank in range(2)]
    assert [run.steps.tolist() for run in runs] == [[0, 1, 2, 3], [0, 1]]
    assert [run.path for run in open_runs([ended / "apart"])[0]] == [run.path for run in runs]  # what commands read
    assert not np.array_equal(runs[0].metric("entropy")[:2], runs[1].metric("entropy"))
    assert [rank["run"] for rank in told(ended, "apart")] == ["rank00000", "rank00001"]


def test_different_weights_under_one_name_are_named(ended: Path) -> None:
    """And steps that were counted differently."""
    found = dict(problems(ended, "different"))
    assert set(found) == {"blocks.1.attention", "step"}
    assert found["blocks.1.attention"].startswith("ranks hold different weights under this name")
    assert found["step"] == "ranks count steps differently, 1 apart; count alike on all"


def test_a_budget_is_kept_by_all_alike(ended: Path) -> None:
    """What a sample costs differs from rank to rank: the steps that are sampled do not."""
    first, second = (rank["samples"] for rank in told(ended, "keeps_a_budget"))
    assert first == second == attnwatch.open_run(ended / "keeps_a_budget").steps.tolist()
    assert len(first) < 40  # it was lengthened
    assert "ranks" not in dict(problems(ended, "keeps_a_budget"))


def test_a_resumed_run_goes_on_with_the_steps(ended: Path) -> None:
    """Its first step is sampled: there the ranks meet."""
    steps = [attnwatch.open_run(ended / "resumes" / name).steps.tolist() for name in ("first", "second")]
    assert steps == [[0, 3], [5, 8]]


def test_a_state_that_one_rank_alone_was_given_holds_up_nobody(ended: Path) -> None:
    run = attnwatch.open_run(ended / "resumes_unequally" / "second")
    assert run.steps.tolist() == [5, 8]
    assert [text for _, text in problems(ended, "resumes_unequally/second")] == [
        "ranks count steps differently, 5 apart; count alike on all"
    ]


def test_a_sample_is_two_collectives(ended: Path) -> None:
    """However many layers and kinds of merge. What ranks hold is told in the first sample, the alert of the third in
    the fourth: each once."""
    plain = ["exchange", "exchange"]
    news = [*plain, "gather", *plain]
    for rank in told(ended, "counts"):
        assert rank["each"] == [news, plain, plain, news, plain, plain]


def test_a_rank_whose_connection_breaks_is_not_waited_for(ended: Path) -> None:
    """Not even by one that noticed nothing."""
    assert attnwatch.open_run(ended / "breaks").steps.tolist() == [0, 1, 2, 3]
    ((_, text),) = problems(ended, "breaks")
    assert text.startswith("ranks are not merged any more: ConnectionResetError: reset by peer")
    assert all(rank["seconds"] < 60 for rank in told(ended, "breaks"))


def test_a_rank_that_is_killed_in_the_middle_of_a_sample_ends_the_merging_only(ended: Path) -> None:
    assert len(told(ended, "dies")) == 1
    run = attnwatch.open_run(ended / "dies")
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert run.ended
    ((where, text),) = problems(ended, "dies")
    assert where == "ranks"
    assert text.startswith("ranks are not merged any more: ")


# --- what cannot begin ------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended() -> Iterator[None]:
    """This process is rank 1 of two, says torch; there is no other, and no store to meet at."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("pretended")
def test_separate_runs_need_a_directory_that_all_ranks_know() -> None:
    """By the clock each would choose its own."""
    with pytest.raises(UsageError, match='expected run= with merge="none", found none'):
        attnwatch.watch(decoder(), merge="none")
    with pytest.raises(UsageError, match=r'expected merge to be "ranks" or "none", found \'all\''):
        attnwatch.watch(decoder(), merge="all")


@pytest.mark.usefixtures("pretended")
def test_where_ranks_cannot_meet_each_records_for_itself(tmp_path: Path) -> None:
    model = decoder()
    with attnwatch.watch(model, run=tmp_path / "run", report=False) as monitor:
        ranks_ends.fit(monitor, model, [0])
    assert monitor.run == tmp_path / "run-rank00001"
    assert attnwatch.open_run(monitor.run).steps.tolist() == [0]
    ((where, text),) = ((problem.where, problem.text) for problem in monitor.problems)
    assert where == "ranks"
    assert text.startswith("ranks are not merged: ")
