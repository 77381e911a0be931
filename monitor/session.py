"""`Monitor`: when to sample, and who is told. The one place where tensors become numbers over time."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from attnwatch.hooks.probe import Probe, Reading
from attnwatch.hooks.ranks import Agreed, Given, PartedError, Ranks, nothing
from attnwatch.monitor.alerts import SEVERITIES, Alert, TrainingStopped
from attnwatch.monitor.cadence import SPARSE, TOO_SPARSE, Cadence, Change
from attnwatch.monitor.card import card
from attnwatch.monitor.journal import NO_STEP, Journal, News
from attnwatch.monitor.options import Options
from attnwatch.monitor.outputs.log import status
from attnwatch.monitor.outputs.prometheus import PrometheusOutput
from attnwatch.monitor.rules import Engine
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, Update, UsageError
from attnwatch.monitor.scalars import Pending, plain, step_number
from attnwatch.monitor.state import Counts, thaw_counts

LOG = logging.getLogger("attnwatch")


class Monitor:
    """A watched training run. Made by `watch`; use it as a context manager, or call `close()` at the end."""

    _closed = True  # until it is complete

    def __init__(
        self,
        probe: Probe,
        journal: Journal,
        engine: Engine,
        metrics: tuple[Metric, ...],
        options: Options,
        optimizer: torch.optim.Optimizer | None,
        report: bool,
        ranks: Ranks | None = None,
        alone: Callable[[], Journal] | None = None,
    ) -> None:
        """ranks: those to merge with. alone: opens the run that a rank other than 0 records if they do not merge."""
        self.run = journal.path
        self.last: Sample | None = None
        self._probe, self._journal, self._engine = probe, journal, engine
        self._metrics = tuple(metric.name for metric in metrics)
        self._options = options
        self._report = report
        self._ranks, self._alone = ranks, alone
        self._records = ranks is None or ranks.rank == 0
        self._shape: Callable[[Given], Reading] | None = None  # of merged samples, once ranks have parted
        self._agreed: Agreed | None = None
        self._news = News()
        self._sent = 0  # of the problems, to the other ranks
        self._step = -1  # newest finished step
        self._cadence = Cadence(options.every, options.budget if self._records else None, options.spectrum_every)
        self._stepped: float | None = None  # when the newest step of this process was finished
        self._samples = 0
        self._seconds = 0.0
        self._armed = False
        self._pending: Pending[Tensor] = Pending()
        self._scalars: dict[str, float] = {}
        self._coverage: tuple[Coverage, ...] = ()
        self._changed: list[Alert] = []
        self._stop: Alert | None = None
        self._wish: Alert | None = None  # to stop, of rank 0; the other ranks hear of it with the next sample
        self._counter: RemovableHandle | None = None
        if optimizer is not None:
            # A compiled optimizer.step would trace its hooks. This one also keeps a monitor that no variable holds.
            self._counter = optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: self._count_step()))
        self._process = os.getpid()
        self._at_exit = partial(_if_alive, weakref.WeakMethod(self.__exit__))
        atexit.register(self._at_exit)
        self._closed = False
        self._journal.safely("hooks", self._arm)

    # --- what the trainer calls -----------------------------------------------------------------------------------

    def step(self, step: int | None = None, **scalars: float | Tensor) -> None:
        """Say that an optimizer step is done, and what the trainer knows of it (`loss`, `grad_norm`, `lr`, any other).

        step: its number; None counts from 0. Scalars may be 0-d tensors; those of an accelerator are read with the
        next sample, so that nothing waits for the device. With `optimizer=` the step was counted already.
        Raises TrainingStopped if `stop_on` was given and such an alert fired; nothing else.
        """
        if self._over:
            return
        self._journal.safely("monitor", lambda: self._advance(step, scalars))
        if self._stop is not None:
            alert, self._stop = self._stop, None
            raise TrainingStopped(alert)

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far: pending, firing and resolved, oldest first. On other ranks than 0: those up to the newest
        sample but one."""
        return list(self._engine.alerts if self._records else self._news.alerts)

    @property
    def coverage(self) -> list[Coverage]:
        """How surely each attention layer is seen; empty before the first sample."""
        return list(self._coverage)

    @property
    def problems(self) -> list[Problem]:
        """What does not work, each said once."""
        return list(self._journal.problems)

    @property
    def metrics_port(self) -> int | None:
        """The port that Prometheus can scrape, None without one."""
        return next((output.port for output in self._journal.outputs if isinstance(output, PrometheusOutput)), None)

    def report(self) -> Path:
        """Write `report.html` and `summary.json` into the run directory, as things stand; the page's path. A rank whose
        run another one records leaves that to it."""
        if not self._records:
            return self.run / "report.html"
        from attnwatch.monitor.store import open_run
        from attnwatch.reports.html import write_page_and_summary

        return write_page_and_summary([open_run(self.run)], self.run / "report.html")

    def state_dict(self) -> dict[str, Any]:
        """What to keep in a checkpoint: counts, alerts and what the rules remember, as data for JSON or `torch.save`.

        Scalars that an accelerator still holds are read for it. Never raises.
        """
        self._journal.safely("monitor", self._flush)
        counts = Counts(self._step, self._cadence.count, self._samples, self._seconds)
        return {"counts": counts._asdict(), "engine": self._engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: no alert is repeated or forgotten. Call it right after `watch`.

        The new run directory begins with the alerts of the old one. Raises UsageError after the first step, and for a
        state of other rules or metrics.
        """
        if self._closed or self._cadence.count:
            raise UsageError("expected load_state_dict right after watch(), found steps done; call it before the first")
        counts, self._engine = thaw_counts(state), self._engine.resumed(state["engine"])
        self._step, finished, self._samples, self._seconds = counts
        self._cadence.resume(finished, at_once=self._ranks is not None)  # ranks meet, whatever each was told before
        self._journal.step, self._scalars = self._step, self._engine.scalars
        self._journal.event("resumed", self._step, {"state": self._engine.state_dict()})
        for alert in self._engine.alerts:
            self._journal.alert(alert)
        if not self._cadence.due:
            self._armed = False
            self._journal.safely("hooks", self._probe.disarm)

    def close(self) -> None:
        """Take the hooks off, write what is pending and the report, close the outputs. Idempotent."""
        if self._over:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._counter is not None:
            self._counter.remove()
        if self._ranks is not None:
            self._ranks.leave()
        self._journal.safely("hooks", self._probe.close)
        del self._probe  # and with it the model
        self._journal.safely("monitor", self._flush)
        if self._stepped is None:
            self._journal.problem("step", NO_STEP)
        end = {"time": time.time(), "samples": self._samples, "seconds": self._seconds}
        self._journal.end(self._step, end)
        if self._report:
            self._journal.safely("report", self.report)
        self._tell(is_new=False)
        self._journal.dismiss()
        self._tell(is_new=False)  # the log hears what came up in the others' end
        self._journal.close()

    __del__ = close

    @property
    def _over(self) -> bool:
        """Closed, or the copy in a forked process: the run, its ranks and its outputs are the parent's."""
        return self._closed or os.getpid() != self._process

    def __copy__(self, memo: object = None) -> Monitor:
        """A run has one monitor: a copy that is dropped must not close it."""
        return self

    __deepcopy__ = __copy__

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.blame(kind)
        self.close()

    def __str__(self) -> str:
        return status(self._now(), self._coverage, self.alerts, self.problems)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return card("attnwatch", self._now(), self._coverage, self.alerts, self.last, self.problems)

    def _now(self) -> str:
        following = "closed" if self._closed else f"next sampled step {self._step + 1 + self._cadence.until}"
        return f"step {max(self._step, 0)}, {following}, recorded in {self.run}"

    # --- one step ---------------------------------------------------------------------------------------------------

    def _advance(self, step: int | None, scalars: Mapping[str, Any]) -> None:
        if self._counter is None:
            self._step = self._journal.step = step_number(step, self._step + 1, self._journal.problem)
        if scalars:
            numbers = {name: plain(name, x, self._journal.problem) for name, x in scalars.items()}
            self._pending.add(self._step if self._counter is None else max(self._step, 0), numbers)
        if self._counter is None:
            self._finish_step()
        elif self._step >= 0 and not self._pending.later():  # before the first step they wait for its sample
            self._flush()

    def _count_step(self) -> None:
        """The optimizer's hook: a step is done, its scalars may still come."""
        if not self._over:
            self._step = self._journal.step = self._step + 1
            self._journal.safely("monitor", self._finish_step)

    def _finish_step(self) -> None:
        cost = None
        if self._armed:
            self._armed = False
            before = self._seconds
            self._journal.safely("sample", self._take_sample)
            cost = self._seconds - before
        if not self._pending.later():
            self._flush()
        now = time.perf_counter()
        duration = math.nan if self._stepped is None else now - self._stepped
        self._stepped = now
        changed = self._cadence.finish(duration, cost)
        if changed is not None:
            self._name_interval(changed)
        if cost is not None and self._agreed is not None:
            self._cadence.follow(self._agreed.interval)
        if self._cadence.due and not self._closed:
            self._journal.safely("hooks", self._arm)

    def _name_interval(self, changed: Change) -> None:
        self._journal.event("interval", self._step, changed._asdict())
        if changed.interval > SPARSE:
            self._journal.problem("budget", TOO_SPARSE)

    def _arm(self) -> None:
        if self._ranks is None and not self._records:
            return  # the others have gone on without this rank
        is_first = not self._coverage  # of this process: nothing is proved yet
        asked = self._probe.due if self._agreed is None else self._agreed.look
        self._armed = self._ranks is not None  # they wait for this one, whatever happens here
        self._probe.arm(look=is_first or self._samples % self._options.spectrum_every == 0 or asked)
        self._armed = True

    def _take_sample(self) -> None:
        later = self._pending.later()
        read: list[Reading] = []
        worked = self._journal.safely("sample", lambda: read.append(self._probe.finish(later)))
        if not worked and self._ranks is None:
            return
        reading = read[0] if worked else nothing([float(x) for x in later])
        self._pending.settle(list(reading.extras))
        self._flush(before=self._step)
        if self._ranks is not None or self._shape is not None:
            reading = self._merged(reading)
        if self._ranks is None and not self._records:
            return
        sample = Sample(self._step, time.time(), self._metrics, reading.measured, reading.values, reading.seconds)
        self._samples += 1
        self._seconds += reading.seconds
        self._note(reading)
        if reading.measured:
            self.last = sample
            self._journal.sample(sample)
        else:
            self._journal.event("unmeasured", self._step, {})
        if self._records:
            self._told(self._engine.on_sample(sample, self._coverage, self._scalars))
        self._tell(is_new=bool(reading.measured))

    def _note(self, reading: Reading) -> None:
        """Coverage and problems of a sample, recorded when they change."""
        coverage = tuple(
            Coverage(x.name, x.state, x.heads, x.kv_heads, x.head_dim, x.qk_norm, x.note, x.dtype)
            for x in reading.layers
        )
        if coverage != self._coverage:
            self._coverage = coverage
            self._journal.event("coverage", self._step, {"layers": [asdict(layer) for layer in coverage]})
        for where, text in reading.problems:
            self._journal.problem(where, text)
        self._sent = len(self._journal.problems)

    def _flush(self, before: int | None = None) -> None:
        """Record pending scalars and ask the rules, oldest first; those of step `before` come after its sample."""
        for step, numbers in self._pending.take(before):
            self._scalars.update(numbers)
            self._journal.scalars(step, numbers)
            if self._records:
                self._told(self._engine.on_scalars(step, numbers))
            self._tell(is_new=False)

    # --- several ranks ----------------------------------------------------------------------------------------------

    def _merged(self, reading: Reading) -> Reading:
        """What all ranks hold, in the place of what this one does; its scalars of this step likewise."""
        scalars: dict[str, float] = {}
        for _, numbers in self._pending.take():
            scalars.update(numbers)
        problems = [(problem.where, problem.text) for problem in self._journal.problems[self._sent :]]
        reading = reading._replace(problems=(*reading.problems, *problems))
        given = Given(self._step, reading, scalars, self._probe.due, self._cadence.interval, self._new())
        if self._ranks is not None:
            try:
                self._agreed = self._ranks.merge(given)
                self._hear(self._agreed)
                scalars, reading = self._agreed.scalars, self._agreed.reading
            except PartedError as parted:
                self._part(self._ranks, parted)
        if self._shape is not None:
            reading = self._shape(given)
        if scalars:
            self._pending.add(self._step, {**scalars})
        return reading

    def _new(self) -> News | None:
        """What rank 0 has to tell the others."""
        news = self._news._replace(run=str(self.run), alerts=self._engine.alerts, stop=self._wish)
        if not self._records or news == self._news:
            return None
        self._news = news
        return news

    def _hear(self, agreed: Agreed) -> None:
        """All ranks stop at the sample at which rank 0 says so."""
        told = agreed.news[0] if agreed.news else None
        if told is not None:
            self._news, self.run = told, Path(told.run)
            self._stop, self._wish = told.stop, None

    def _part(self, ranks: Ranks, parted: PartedError) -> None:
        """Rank 0 goes on with its share. Another one records its own if they never merged, else it ends here."""
        self._ranks = self._agreed = None
        if not self._records and not parted.began and self._alone is not None:
            alone = self._alone
            self._records = self._journal.safely("run directory", lambda: setattr(self, "_journal", alone()))
            self._journal.step, self.run = self._step, self._journal.path
        self._shape = ranks.own if self._records and parted.began else None
        text = f"ranks are not merged{' any more' if parted.began else ''}: {parted}; "
        text += f"this run holds what rank {ranks.rank} sees" if self._records else "nothing more is measured here"
        text += "; stop_on is off: a rank that stops alone holds up the others" if self._options.stop_on else ""
        self._options, self._wish = replace(self._options, stop_on=None), None
        self._journal.problem("ranks", text)
        if ranks.rank:
            LOG.warning("attnwatch: rank %d: %s", ranks.rank, text)

    # --- who is told ------------------------------------------------------------------------------------------------

    def _told(self, changed: Sequence[Alert]) -> None:
        for alert in changed:
            self._changed.append(alert)
            self._journal.alert(alert)
            if self._options.stop_on and alert.state == "firing":
                grave = SEVERITIES.index(alert.severity) >= SEVERITIES.index(self._options.stop_on)
                self._wish = self._wish or (alert if grave else None)
        if self._ranks is None:
            self._stop, self._wish = self._stop or self._wish, None

    def _tell(self, is_new: bool) -> None:
        changed, self._changed = tuple(self._changed), []
        self._journal.tell(Update(
            self._step, self.last, is_new, dict(self._scalars), self._engine.alerts, changed, self._coverage,
            tuple(self._journal.problems), self._samples, self._seconds, self.run, self._cadence.interval,
            self._cadence.share,
        ))  # fmt: skip


def _if_alive(method: weakref.WeakMethod[Callable[..., None]]) -> None:
    if (alive := method()) is not None:  # blames what ends the process: the exception that a script has just printed
        alive(None if hasattr(sys, "ps1") else getattr(sys, "last_type", None), None, None)
