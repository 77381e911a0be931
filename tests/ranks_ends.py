"""One of two gloo processes, one of which leaves, fails, stops or dies while both are watched."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks_decoder import LENGTH, TOKENS, WATCH, decoder, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import attnwatch
from attnwatch import Monitor, Rule, TrainingStopped, UsageError
from attnwatch.hooks import ranks

QUICK: dict[str, Any] = {**WATCH, "every": 1, "spectrum_every": 2}
Told = dict[str, Any]


def rank() -> int:
    return dist.get_rank()


def fit(monitor: Monitor | None, model: nn.Module, steps: Iterable[int] = range(4), **scalars: float) -> int:
    """Steps done. The ranks share nothing but the watching: what one does holds up no other's training."""
    done = 0
    for step in steps:
        tokens = torch.randint(TOKENS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2 * step + rank()))
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        done += 1
        if monitor is not None:
            monitor.step(step, mark=step, **scalars)
    return done


def told(monitor: Monitor, **more: Any) -> Told:
    problems = [(problem.where, problem.text) for problem in monitor.problems]
    last = None if monitor.last is None else monitor.last.step
    return {"run": monitor.run.name, "problems": problems, "last": last, **more}


# --- what may happen --------------------------------------------------------------------------------------------------


def fails(place: Path) -> Told:
    """Rank 1 cannot measure in the second sample, nor arm its hooks for the last."""
    model = decoder()
    with attnwatch.watch(model, run=place, **QUICK) as monitor:
        probe = monitor._probe
        finish, arm = probe.finish, probe.arm
        fit(monitor, model, [0])
        if rank() == 1:
            probe.finish = lambda *_: finish() and 1 / 0  # type: ignore[method-assign, assignment, return-value]
        fit(monitor, model, [1])
        probe.finish = finish  # type: ignore[method-assign]
        if rank() == 1:
            probe.arm = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        fit(monitor, model, [2])
        probe.arm = arm  # type: ignore[method-assign]
        fit(monitor, model, [3])
    return told(monitor)


def leaves(place: Path) -> Told:
    """Rank 1 closes its monitor after two steps, and trains on."""
    model = decoder()
    monitor = attnwatch.watch(model, run=place, **QUICK)
    fit(monitor, model, [0, 1])
    if rank() == 1:
        monitor.close()
    fit(monitor, model, [2, 3])
    monitor.close()
    return told(monitor)


def stays_away(place: Path) -> Told:
    """Rank 1 is not watched."""
    model = decoder()
    if rank() == 1:
        fit(None, model)
        return {}
    ranks.START = 0.5
    with attnwatch.watch(model, run=place, **QUICK) as monitor:
        fit(monitor, model)
    return told(monitor)


def first_stays_away(place: Path) -> Told:
    """Rank 0 is not watched."""
    model = decoder()
    if rank() == 0:
        fit(None, model)
        return {}
    ranks.START = 0.5
    with attnwatch.watch(model, run=place, **QUICK) as monitor:
        fit(monitor, model)
    return told(monitor)


def falls_silent(place: Path) -> Told:
    """Rank 1 calls `step` no more after the first; rank 0 waits as long as its patience lasts."""
    model = decoder()
    monitor = attnwatch.watch(model, run=place, **QUICK)
    fit(monitor, model, [0])
    before, ranks.PATIENCE, ranks.SPEAK = ranks.PATIENCE, 1.0, 0.5
    fit(monitor if rank() == 0 else None, model, [1, 2])
    ranks.PATIENCE = before
    dist.barrier()  # rank 1 is still there, and silent
    monitor.close()
    return told(monitor)


def is_interrupted(place: Path) -> Told:
    """Ctrl-C at rank 0 while it waits, for a minute at most, for a rank 1 that comes when it is too late."""
    model, waited = decoder(), 0.0
    monitor = attnwatch.watch(model, run=place, **QUICK)
    fit(monitor, model, [0])
    if rank() == 0:
        before, ranks.PATIENCE, ranks.SPEAK = (ranks.PATIENCE, ranks.SPEAK), 60.0, 0.5
        Timer(1.5, signal.raise_signal, [signal.SIGINT]).start()
        start = time.monotonic()
        with suppress(KeyboardInterrupt):
            fit(monitor, model, [1])
        waited = time.monotonic() - start
        monitor.close()
        ranks.PATIENCE, ranks.SPEAK = before
    dist.barrier()
    fit(monitor, model, [1])
    monitor.close()
    return told(monitor, waited=waited)


def joins(place: Path) -> Told:
    """Rank 1 has half of the data: DDP shadows what it does not do any more."""
    model = DistributedDataParallel(decoder())
    with model.join():  # type: ignore[no-untyped-call]
        monitor = attnwatch.watch(model, run=place, **QUICK)
        start = time.monotonic()
        fit(monitor, model, range(4 if rank() == 0 else 2))
        monitor.close()
    return told(monitor, seconds=time.monotonic() - start)


def sees_nothing(place: Path) -> Told:
    model = decoder().eval()
    with attnwatch.watch(model, run=place, **QUICK) as monitor:
        fit(monitor, model, range(2))
    return told(monitor)


def holds_none(place: Path) -> Told:
    """Rank 1 has no attention, as the last stage of a pipeline may."""
    model = decoder() if rank() == 0 else nn.Sequential(nn.Linear(4, 4))
    with attnwatch.watch(model, run=place, **QUICK) as monitor:
        for step in range(2):
            if rank() == 0:
                fit(monitor, model, [step])
            else:
                monitor.step(step, loss=float(step))
    return told(monitor)


def stops(place: Path) -> Told:
    """An alert on rank 0 between two samples."""
    model, stopped = decoder(), ""
    rules = [Rule("late", "critical", "scalar.mark >= 3")]
    monitor = attnwatch.watch(model, run=place, **{**QUICK, "every": 2}, rules=rules, stop_on="critical")
    done = 0
    try:
        for step in range(20):
            done += fit(monitor, model, [step])
    except TrainingStopped as error:
        done, stopped = step, error.alert.rule
    monitor.close()
    return told(monitor, done=done, stopped=stopped, alerts=[alert.rule for alert in monitor.alerts])


def cannot_stop(place: Path) -> Told:
    """The same alert, when rank 1 has closed its monitor: it would wait for a rank 0 that stops."""
    model = decoder()
    rules = [Rule("late", "critical", "scalar.mark >= 3")]
    monitor = attnwatch.watch(model, run=place, **QUICK, rules=rules, stop_on="critical")
    fit(monitor, model, [0, 1])
    if rank() == 1:
        monitor.close()
    done = fit(monitor, model, [2, 3, 4])
    monitor.close()
    refused = ""
    try:
        attnwatch.watch(model, run=place.with_name("refused"), **QUICK, stop_on="critical", merge="none")
    except UsageError as error:
        refused = str(error)
    return told(monitor, done=done, refused=refused, alerts=[alert.rule for alert in monitor.alerts])


def apart(place: Path) -> Told:
    model = decoder()
    with attnwatch.watch(model, run=place, **QUICK, merge="none") as monitor:
        fit(monitor, model, range(4 if rank() == 0 else 2))
    return told(monitor)


def different(place: Path) -> Told:
    """Two models under one name, one step apart."""
    model = decoder()
    if rank() == 1:
        nn.init.normal_(model.get_submodule("blocks.1.attention.q").weight)
    with attnwatch.watch(model, run=place, **QUICK) as monitor:
        fit(monitor, model, [rank()])
    return told(monitor)


def keeps_a_budget(place: Path) -> Told:
    """The interval that rank 0 chose holds on both."""
    model = decoder()
    samples = []
    with attnwatch.watch(model, run=place, **QUICK, budget=0.2) as monitor:
        for step in range(40):
            fit(monitor, model, [step])
            samples.append(-1 if monitor.last is None else monitor.last.step)
    return told(monitor, samples=sorted(set(samples)))


def resumes(place: Path) -> Told:
    model = decoder()
    with attnwatch.watch(model, run=place / "first", **{**QUICK, "every": 3}) as monitor:
        fit(monitor, model, range(5))
        state = monitor.state_dict()
    with attnwatch.watch(model, run=place / "second", **{**QUICK, "every": 3}) as monitor:
        monitor.load_state_dict(state)
        fit(monitor, model, range(5, 10))
    return told(monitor)


def resumes_unequally(place: Path) -> Told:
    """Training holds the ranks together, and only one of them has a state to go on with."""
    model = DistributedDataParallel(decoder())
    with attnwatch.watch(model, run=place / "first", **{**QUICK, "every": 3}) as monitor:
        fit(monitor, model, range(5))
        state = monitor.state_dict()
    with attnwatch.watch(model, run=place / "second", **{**QUICK, "every": 3}) as monitor:
        if rank() == 0:
            monitor.load_state_dict(state)
        fit(monitor, model, range(5, 10) if rank() == 0 else range(5))
    return told(monitor)


def dies(place: Path) -> Told:
    """Rank 1 is killed in the middle of a sample, behind the open door."""
    model = decoder()
    monitor = attnwatch.watch(model, run=place, **QUICK)
    fit(monitor, model, [0, 1])
    if rank() == 1:
        dist.all_to_all_single = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    fit(monitor, model, [2, 3])
    monitor.close()
    return told(monitor)


def breaks(place: Path) -> Told:
    """Rank 1 loses its connection when rank 0 already has all it needs of a sample."""
    model, exchange, sent = decoder(), dist.all_to_all_single, []
    monitor = attnwatch.watch(model, run=place, **QUICK)
    fit(monitor, model, [0])

    def broken(*call: Any, **more: Any) -> None:
        sent.append(exchange(*call, **more))
        if len(sent) == 2:
            raise ConnectionResetError("reset by peer")

    if rank() == 1:
        dist.all_to_all_single = broken
    start = time.monotonic()
    fit(monitor, model, [1, 2, 3])
    dist.all_to_all_single = exchange
    monitor.close()
    return told(monitor, seconds=time.monotonic() - start)


def counts(place: Path) -> Told:
    """Collectives of each of six samples; rank 0 has an alert in the third, which goes on."""
    model, called = decoder(), []
    collectives = dist.all_to_all_single, dist.all_gather_object
    dist.all_to_all_single = lambda *call, **more: (called.append("exchange"), collectives[0](*call, **more))
    dist.all_gather_object = lambda *call: (called.append("gather"), collectives[1](*call))
    each = []
    rules = [Rule("late", "info", "scalar.mark >= 2")]
    with attnwatch.watch(model, run=place, **QUICK, rules=rules) as monitor:
        for step in range(6):
            fit(monitor, model, [step])
            each.append(list(called))
            called.clear()
    dist.all_to_all_single, dist.all_gather_object = collectives
    return told(monitor, each=each)


ENDS = (
    fails, leaves, stays_away, first_stays_away, falls_silent, is_interrupted, joins, sees_nothing, holds_none, stops,
    cannot_stop, apart, different, keeps_a_budget, resumes, resumes_unequally, counts, breaks, dies,
)  # fmt: skip

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        ranks.START = 60.0  # a busy machine keeps one of them from coming at once
        dist.barrier()
        way = {end.__name__: end for end in ENDS}[name]
        content = way(Path(sys.argv[1]) / name)
        (Path(sys.argv[1]) / f"{name}-{rank()}.json").write_text(json.dumps(content))
    with suppress(Exception):  # the other one may be dead
        dist.destroy_process_group()
