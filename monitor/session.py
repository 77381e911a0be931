"""`watch` and `Monitor`: when to sample, and who is told. The one place where tensors become numbers over time."""

from __future__ import annotations

import atexit
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnwatch.hooks import sites
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe, Reading
from attnwatch.monitor.alerts import SEVERITIES, Alert
from attnwatch.monitor.alerts import TrainingStopped as TrainingStopped
from attnwatch.monitor.journal import NO_STEP, Journal
from attnwatch.monitor.journal import Output as Output
from attnwatch.monitor.options import SPECTRUM_EVERY, Options, check_outputs, choose_rules, header, run_directory
from attnwatch.monitor.outputs.log import LogOutput, status
from attnwatch.monitor.outputs.prometheus import PrometheusOutput
from attnwatch.monitor.rules import Engine, Rule, of_file
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, Update, UsageError
from attnwatch.monitor.scalars import Pending
from attnwatch.monitor.state import Counts, thaw_counts
from attnwatch.monitor.store import RunWriter


def watch(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    run: str | os.PathLike[str] | None = None,
    every: int = 20,
    spectrum_every: int | None = None,
    rows: int | None = 64,
    sequences: int = 4,
    rules: str | os.PathLike[str] | Sequence[Rule] | None = None,
    outputs: Sequence[Output] = (),
    prometheus: int | None = None,
    report: bool = True,
    adapters: Sequence[Any] = (),
    compiled: str = "eager",
    context: int | None = None,
    stop_on: str | None = None,
) -> Monitor:
    """Watch the attention of a model while it trains. Attach before the first step; training is not changed.

    optimizer: count steps by its step hook instead of by `monitor.step()`.
    run: directory to record in (new or empty); None: `runs/<date>-<time>`.
    every: the first step is sampled, then every `every`-th. spectrum_every: the weights are looked at in the first
        sample, then in every `spectrum_every`-th (None: every fifth); rules use the last known spectrum.
    rows, sequences: at most so many query rows of so many sequences of a batch are measured (rows=None: all rows).
    rules: a TOML file or a list of `Rule`; None: the default rules (`attnwatch rules` prints them).
    outputs: more objects with `write(update)` and `close()`. prometheus: a port on 127.0.0.1, 0 picks one.
    report: write `report.html` and `summary.json` into the run at `close()`.
    adapters: objects that tell of your own attention layers by `match`, `weights` or `record` (hooks/adapters.py).
    compiled: how to see into torch.compile. "eager": sampled steps run eagerly (rounding too), the compiled graphs
        are kept and used between them. "graph": an operator stands in the graphs that inductor compiles from now on
        (what was compiled before, anywhere in the process, is compiled anew); every step runs compiled, with the same
        bits as unwatched. It sees fused attention in training. Attention that is not fused (by hand, flex_attention,
        on a CPU with dropout or a learned bias), `observe`, other backends and what runs eagerly stay unseen, and are
        named as problems.
    context: a longer context, in keys, that the model is meant for later: `forecast_sharpness` is measured for it.
    stop_on: "info", "warning" or "critical": `monitor.step` raises `TrainingStopped` when such an alert fires.

    Raises UsageError, one line, for a model without attention, a wrong option or rule, a port in use, a run
    directory that cannot be written or holds a run. After that nothing but `TrainingStopped` is ever raised.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module to watch, found {type(model).__name__}")
    if not adapters and not sites.may_hold_attention(model):
        raise UsageError(
            f"expected a model with attention, found none in {type(model).__name__} (no module or forward code names "
            "it); call attnwatch.observe(module, q, k) in the forward of an attention that has no softmax"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected optimizer to be a torch.optim.Optimizer, found {type(optimizer).__name__}")
    check_outputs(outputs)
    directory = run_directory(run)
    chosen, source = choose_rules(rules)
    options = Options(
        every=every,
        spectrum_every=SPECTRUM_EVERY if spectrum_every is None else spectrum_every,
        rows=rows,
        sequences=sequences,
        rules=source,
        prometheus=prometheus,
        stop_on=stop_on,
        optimizer=type(optimizer).__name__ if optimizer else None,
        compiled=compiled,
        context=context,
    )
    try:
        probe = Probe(model, rows, sequences, adapters, graph=compiled == "graph", context=context)
    except ValueError as error:
        raise UsageError(str(error)) from None
    metrics = tuple(Metric(*metric) for metric in METRICS)
    with of_file(rules if isinstance(rules, str | os.PathLike) else None):
        engine = Engine(chosen, metrics)
    facts = {"model": type(model).__name__, "parameters": sum(x.numel() for x in model.parameters())}
    described = header(options, metrics, chosen, {"torch": torch.__version__}, **facts)
    server = None if prometheus is None else PrometheusOutput(metrics, prometheus)
    try:
        writer = RunWriter(directory, described)
    except BaseException:
        if server is not None:
            server.close()
        raise
    told: list[Output] = [LogOutput(), *([server] if server else []), *outputs]
    return Monitor(probe, Journal(writer, told), engine, metrics, options, optimizer, report)


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
    ) -> None:
        self.run = journal.path
        self.last: Sample | None = None
        self._probe, self._journal, self._engine = probe, journal, engine
        self._metrics = tuple(metric.name for metric in metrics)
        self._options = options
        self._report = report
        self._step = -1  # newest finished step
        self._count = 0  # steps finished while attached
        self._idle = True  # no step was finished in this process
        self._samples = 0
        self._seconds = 0.0
        self._armed = False
        self._pending: Pending[Tensor] = Pending()
        self._scalars: dict[str, float] = {}
        self._coverage: tuple[Coverage, ...] = ()
        self._changed: list[Alert] = []
        self._stop: Alert | None = None
        self._counter: RemovableHandle | None = None
        if optimizer is not None:
            # A compiled optimizer.step would trace its hooks. This one also keeps a monitor that no variable holds.
            self._counter = optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: self._count_step()))
        self._process = os.getpid()
        self._at_exit = partial(_if_alive, weakref.WeakMethod(self._drop))
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
        if self._closed:
            return
        self._journal.safely("monitor", lambda: self._advance(step, scalars))
        if self._stop is not None:
            alert, self._stop = self._stop, None
            raise TrainingStopped(alert)

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far: pending, firing and resolved, oldest first."""
        return list(self._engine.alerts)

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
        """Write `report.html` and `summary.json` into the run directory, as things stand; the page's path."""
        from attnwatch.monitor.store import open_run
        from attnwatch.reports.html import write_page_and_summary

        return write_page_and_summary([open_run(self.run)], self.run / "report.html")

    def state_dict(self) -> dict[str, Any]:
        """What to keep in a checkpoint: counts, alerts and what the rules remember, as data for JSON or `torch.save`.

        Scalars that an accelerator still holds are read for it. Never raises.
        """
        self._journal.safely("monitor", self._flush)
        counts = Counts(self._step, self._count, self._samples, self._seconds)
        return {"counts": counts._asdict(), "engine": self._engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: no alert is repeated or forgotten. Call it right after `watch`.

        The new run directory begins with the alerts of the old one. Raises UsageError after the first step, and for a
        state of other rules or metrics.
        """
        if self._closed or self._count:
            raise UsageError("expected load_state_dict right after watch(), found steps done; call it before the first")
        counts, self._engine = thaw_counts(state), self._engine.resumed(state["engine"])
        self._step, self._count, self._samples, self._seconds = counts
        self._journal.step, self._scalars = self._step, self._engine.scalars
        self._journal.event("resumed", self._step, {"state": self._engine.state_dict()})
        for alert in self._engine.alerts:
            self._journal.alert(alert)
        if self._count % self._options.every:
            self._armed = False
            self._journal.safely("hooks", self._probe.disarm)

    def close(self) -> None:
        """Take the hooks off, write what is pending and the report, close the outputs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._counter is not None:
            self._counter.remove()
        self._journal.safely("hooks", self._probe.close)
        del self._probe  # and with it the model
        self._journal.safely("monitor", self._flush)
        if self._idle:
            self._journal.problem("step", NO_STEP)
        end = {"time": time.time(), "samples": self._samples, "seconds": self._seconds}
        self._journal.event("end", self._step, end)
        if self._report:
            self._journal.safely("report", self.report)
        self._journal.close()
        self._tell(is_new=False)  # of the problems that came up here
        self._journal.dismiss()

    def _drop(self) -> None:
        """Nobody holds the monitor any more, or the process ends. The copy in a forked worker is not ours to close."""
        if not self._closed and os.getpid() == self._process:
            self.close()

    __del__ = _drop

    def __copy__(self, memo: object = None) -> Monitor:
        """A run has one monitor: a copy that is dropped must not close it."""
        return self

    __deepcopy__ = __copy__

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __str__(self) -> str:
        until = -self._count % self._options.every
        following = "closed" if self._closed else f"next sampled step {self._step + 1 + until}"
        now = f"step {max(self._step, 0)}, {following}, recorded in {self.run}"
        return status(now, self._coverage, self.alerts, self.problems)

    # --- one step ---------------------------------------------------------------------------------------------------

    def _advance(self, step: int | None, scalars: Mapping[str, Any]) -> None:
        if self._counter is None:
            self._step = self._journal.step = self._number_of(step)
        if scalars:
            self._pending.add(self._step, {name: self._plain(name, value) for name, value in scalars.items()})
        if self._counter is None:
            self._finish_step()
        elif not self._pending.later():
            self._flush()

    def _count_step(self) -> None:
        """The optimizer's hook: a step is done, its scalars may still come."""
        if not self._closed:
            self._step = self._journal.step = self._step + 1
            self._journal.safely("monitor", self._finish_step)

    def _finish_step(self) -> None:
        if self._armed:
            self._armed = False
            self._journal.safely("sample", self._take_sample)
        if not self._pending.later():
            self._flush()
        self._count += 1
        self._idle = False
        if self._count % self._options.every == 0 and not self._closed:
            self._journal.safely("hooks", self._arm)

    def _arm(self) -> None:
        is_first = not self._coverage  # of this process: nothing is proved yet
        self._probe.arm(look=is_first or self._samples % self._options.spectrum_every == 0 or self._probe.due)
        self._armed = True

    def _take_sample(self) -> None:
        reading = self._probe.finish(self._pending.later())
        self._pending.settle(list(reading.extras))
        self._flush(before=self._step)
        sample = Sample(self._step, time.time(), self._metrics, reading.measured, reading.values, reading.seconds)
        self._samples += 1
        self._seconds += reading.seconds
        self._note(reading)
        if reading.measured:
            self.last = sample
            self._journal.sample(sample)
        else:
            self._journal.event("unmeasured", self._step, {})
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

    def _number_of(self, step: Any) -> int:
        try:
            return self._step + 1 if step is None else int(step)
        except (TypeError, ValueError):
            self._journal.problem(
                "step", f"expected a whole number, found {type(step).__name__}; leave it out to count from 0"
            )
            return self._step + 1

    def _plain(self, name: str, value: Any) -> float | Tensor:
        """A number; or a tensor of an accelerator, kept until the next sample so that nothing waits for it."""
        if isinstance(value, Tensor) and value.numel() != 1:
            self._journal.problem(
                name, f"expected a scalar, found a tensor of shape {list(value.shape)}; pass its mean"
            )
            return math.nan
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().clone()
        try:
            return float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            self._journal.problem(
                name, f"expected a number, found {type(value).__name__}; pass a float or a 0-d tensor"
            )
            return math.nan

    def _flush(self, before: int | None = None) -> None:
        """Record pending scalars and ask the rules, oldest first; those of step `before` come after its sample."""
        for step, numbers in self._pending.take(before):
            self._scalars.update(numbers)
            self._journal.scalars(step, numbers)
            self._told(self._engine.on_scalars(step, numbers))
            self._tell(is_new=False)

    # --- who is told ------------------------------------------------------------------------------------------------

    def _told(self, changed: Sequence[Alert]) -> None:
        for alert in changed:
            self._changed.append(alert)
            self._journal.alert(alert)
            if self._options.stop_on and alert.state == "firing":
                grave = SEVERITIES.index(alert.severity) >= SEVERITIES.index(self._options.stop_on)
                self._stop = self._stop or (alert if grave else None)

    def _tell(self, is_new: bool) -> None:
        changed, self._changed = tuple(self._changed), []
        problems = tuple(self._journal.problems)
        update = Update(
            self._step, self.last, is_new, dict(self._scalars), self._engine.alerts, changed, self._coverage, problems,
            self._samples, self._seconds,
        )  # fmt: skip
        self._journal.tell(update)


def _if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()
