"""`watch` and `Monitor`: when to sample, and who is told. The one place where tensors become numbers over time."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import attnwatch
from attnwatch.hooks import sites
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe, Reading
from attnwatch.monitor.alerts import SEVERITIES, Alert
from attnwatch.monitor.outputs.log import LogOutput, coverage_line
from attnwatch.monitor.outputs.prometheus import PrometheusOutput
from attnwatch.monitor.rules import Engine, Rule, load_rules
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, Update, UsageError
from attnwatch.monitor.store import RunWriter


class TrainingStopped(Exception):  # noqa: N818 (a public name: it says what happened)
    """Raised from `Monitor.step` when an alert of the severity given as `stop_on` fired; `alert` is that alert."""

    def __init__(self, alert: Alert):
        super().__init__(f"{alert.rule} ({alert.severity}) at {alert.place}, step {alert.fired_step}: {alert.summary}")
        self.alert = alert


class Output(Protocol):
    """Who is told after every step. An output that raises is switched off and named."""

    def write(self, update: Update) -> None: ...

    def close(self) -> None: ...


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
    stop_on: "info", "warning" or "critical": `monitor.step` raises `TrainingStopped` when such an alert fires.

    Raises UsageError, one line, for a model without attention, a wrong option or rule, a port in use, a run
    directory that cannot be written or holds a run. After that nothing but `TrainingStopped` is ever raised.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module to watch, found {type(model).__name__}")
    if not sites.may_hold_attention(model):
        raise UsageError(
            f"expected a model with attention, found none in {type(model).__name__} (no module or forward code names "
            "it); call attnwatch.observe(module, q, k) in the forward of an attention that has no softmax"
        )
    for name, value in (("every", every), ("spectrum_every", spectrum_every), ("rows", rows), ("sequences", sequences)):
        optional = value is None and name in ("spectrum_every", "rows")
        if not optional and (type(value) is not int or value < 1):
            raise UsageError(f"expected {name} to be a whole number of at least 1, found {value!r}")
    if stop_on is not None and stop_on not in SEVERITIES:
        raise UsageError(f"expected stop_on to be one of {', '.join(SEVERITIES)}, found {stop_on!r}")
    metrics = tuple(Metric(*metric) for metric in METRICS)
    given = () if rules is None or isinstance(rules, str | os.PathLike) else tuple(rules)
    chosen = given or load_rules(None if given or rules is None else rules)  # type: ignore[arg-type]
    engine = Engine(chosen, metrics)
    options = {
        "every": every, "spectrum_every": spectrum_every or 5, "rows": rows, "sequences": sequences,
        "rules": f"{len(given)} given" if given else "default" if rules is None else str(rules),
        "prometheus": prometheus, "stop_on": stop_on, "optimizer": type(optimizer).__name__ if optimizer else None,
    }  # fmt: skip
    server = None if prometheus is None else PrometheusOutput(metrics, prometheus)
    try:
        writer = RunWriter(_run_path(run), _header(model, options, metrics, chosen))
    except BaseException:
        if server is not None:
            server.close()
        raise
    told: list[Output] = [LogOutput(), *([server] if server else []), *outputs]
    return Monitor(Probe(model, rows, sequences), writer, engine, metrics, told, options, optimizer, report)


class Monitor:
    """A watched training run. Made by `watch`; use it as a context manager, or call `close()` at the end."""

    def __init__(
        self,
        probe: Probe,
        writer: RunWriter,
        engine: Engine,
        metrics: tuple[Metric, ...],
        outputs: list[Output],
        options: Mapping[str, Any],
        optimizer: torch.optim.Optimizer | None,
        report: bool,
    ) -> None:
        self.run = writer.path
        self.last: Sample | None = None
        self._probe, self._writer, self._engine, self._outputs = probe, writer, engine, outputs
        self._metrics = tuple(metric.name for metric in metrics)
        self._every: int = options["every"]
        self._spectrum_every: int = options["spectrum_every"]
        self._stop_on: str | None = options["stop_on"]
        self._report = report
        self._step = -1  # newest finished step
        self._count = 0  # steps finished while attached
        self._samples = 0
        self._seconds = 0.0
        self._armed = False
        self._closed = False
        self._pending: list[tuple[int, dict[str, float | Tensor]]] = []
        self._scalars: dict[str, float] = {}
        self._coverage: tuple[Coverage, ...] = ()
        self._problems: list[Problem] = []
        self._changed: list[Alert] = []
        self._stop: Alert | None = None
        self._counter = None if optimizer is None else optimizer.register_step_post_hook(_counter(weakref.ref(self)))
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)
        self._safely("hooks", self._arm)

    # --- what the trainer calls -----------------------------------------------------------------------------------

    def step(self, step: int | None = None, **scalars: float | Tensor) -> None:
        """Say that an optimizer step is done, and what the trainer knows of it (`loss`, `grad_norm`, `lr`, any other).

        step: its number; None counts from 0. Scalars may be 0-d tensors; those of an accelerator are read with the
        next sample, so that nothing waits for the device. With `optimizer=` the step was counted already.
        Raises TrainingStopped if `stop_on` was given and such an alert fired; nothing else.
        """
        if self._closed:
            return
        self._safely("monitor", lambda: self._advance(step, scalars))
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
        return list(self._problems)

    @property
    def metrics_port(self) -> int | None:
        """The port that Prometheus can scrape, None without one."""
        return next((output.port for output in self._outputs if isinstance(output, PrometheusOutput)), None)

    def report(self) -> Path:
        """Write `report.html` and `summary.json` into the run directory, as things stand; the page's path."""
        from attnwatch.monitor.store import open_run
        from attnwatch.reports.html import write_report

        return write_report([open_run(self.run)], self.run / "report.html")

    def close(self) -> None:
        """Take the hooks off, write what is pending and the report, close the outputs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._counter is not None:
            self._counter.remove()
        self._safely("hooks", self._probe.disarm)
        self._safely("monitor", self._flush)
        end = {
            "event": "end",
            "step": self._step,
            "time": time.time(),
            "samples": self._samples,
            "seconds": self._seconds,
        }
        self._safely("run directory", lambda: self._writer.event(end))
        self._safely("run directory", self._writer.close)
        if self._report:
            self._safely("report", self.report)
        for output in self._outputs:
            self._safely(type(output).__name__, output.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __str__(self) -> str:
        covered = coverage_line(self._coverage) if self._coverage else "no sample yet"
        firing = [
            f"{a.severity} {a.rule} at {a.place} since step {a.fired_step}" for a in self.alerts if a.state == "firing"
        ]
        until = -self._count % self._every
        following = "closed" if self._closed else f"next sampled step {self._step + 1 + until}"
        return "\n".join(
            [f"attnwatch: {covered}", f"  step {max(self._step, 0)}, {following}, recorded in {self.run}"]
            + [f"  alert: {line}" for line in firing or ["none firing"]]
            + [f"  problem: {problem.where}: {problem.text}" for problem in self._problems]
        )

    # --- one step ---------------------------------------------------------------------------------------------------

    def _advance(self, step: int | None, scalars: Mapping[str, float | Tensor]) -> None:
        if self._counter is None:
            self._step = self._step + 1 if step is None else int(step)
        if scalars:
            self._pending.append((self._step, {name: self._plain(name, value) for name, value in scalars.items()}))
        if self._counter is None:
            self._finish_step()
        else:
            self._flush_if_known()

    def _count_step(self) -> None:
        """The optimizer's hook: a step is done, its scalars may still come."""
        if not self._closed:
            self._step += 1
            self._safely("monitor", self._finish_step)

    def _finish_step(self) -> None:
        if self._armed:
            self._armed = False
            self._take_sample()
        else:
            self._flush_if_known()
        self._count += 1
        if self._count % self._every == 0:
            self._safely("hooks", self._arm)

    def _arm(self) -> None:
        self._probe.arm(look=self._samples % self._spectrum_every == 0 or self._probe.due)
        self._armed = True

    def _take_sample(self) -> None:
        waiting = [(values, name) for _, values in self._pending for name in values if isinstance(values[name], Tensor)]
        reading = self._probe.finish([values[name] for values, name in waiting])  # type: ignore[misc]
        for (values, name), number in zip(waiting, reading.extras, strict=True):
            values[name] = float(number)
        now = self._step
        self._flush(until=now)
        sample = Sample(now, time.time(), self._metrics, reading.measured, reading.values, reading.seconds)
        self._samples += 1
        self._seconds += reading.seconds
        self._note(reading)
        if reading.measured:
            self.last = sample
            self._safely("run directory", lambda: self._writer.sample(sample))
        self._told(self._engine.on_sample(sample, self._coverage, self._scalars))
        self._tell(is_new=True)
        self._flush()

    def _note(self, reading: Reading) -> None:
        """Coverage and problems of a sample, recorded when they change."""
        coverage = tuple(
            Coverage(x.name, x.state, x.heads, x.kv_heads, x.head_dim, x.qk_norm, x.note, x.dtype)
            for x in reading.layers
        )
        if coverage != self._coverage:
            self._coverage = coverage
            layers = [asdict(layer) for layer in coverage]
            event = {"event": "coverage", "step": self._step, "layers": layers}
            self._safely("run directory", lambda: self._writer.event(event))
        for where, text in reading.problems:
            self._problem(where, text)

    def _plain(self, name: str, value: Any) -> float | Tensor:
        """A number; or a tensor of an accelerator, kept until the next sample so that nothing waits for it."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                self._problem(name, f"expected a scalar, found a tensor of shape {list(value.shape)}; pass its mean")
                return math.nan
            return value.detach().clone() if value.device.type != "cpu" else float(value.detach())
        try:
            return float(value)
        except (TypeError, ValueError):
            self._problem(name, f"expected a number, found {type(value).__name__}; pass a float or a 0-d tensor")
            return math.nan

    def _flush_if_known(self) -> None:
        if not any(isinstance(value, Tensor) for _, values in self._pending for value in values.values()):
            self._flush()

    def _flush(self, until: int | None = None) -> None:
        """Record pending scalars and ask the rules, oldest first; those of step `until` come after its sample."""
        while self._pending and (until is None or self._pending[0][0] < until):
            step, values = self._pending.pop(0)
            numbers = {name: float(value) for name, value in values.items()}
            self._scalars.update(numbers)
            self._safely("run directory", lambda: self._writer.scalars(step, numbers))  # noqa: B023 (called at once)
            self._told(self._engine.on_scalars(step, numbers))
            self._tell(is_new=False)

    # --- who is told ------------------------------------------------------------------------------------------------

    def _told(self, changed: Sequence[Alert]) -> None:
        for alert in changed:
            self._changed.append(alert)
            if alert.fired_step is None:
                continue  # pending ones come and go; the run keeps what fired
            step = alert.resolved_step if alert.state == "resolved" else alert.fired_step
            event = {"event": "alert", "step": step, **asdict(alert)}
            self._safely("run directory", lambda: self._writer.event(event))  # noqa: B023 (called at once)
            if self._stop_on and alert.state == "firing":
                grave = SEVERITIES.index(alert.severity) >= SEVERITIES.index(self._stop_on)
                self._stop = self._stop or (alert if grave else None)

    def _tell(self, is_new: bool) -> None:
        changed, self._changed = tuple(self._changed), []
        update = Update(
            self._step, self.last, is_new and self.last is not None, dict(self._scalars), self._engine.alerts, changed,
            self._coverage, tuple(self._problems), self._samples, self._seconds,
        )  # fmt: skip
        for output in list(self._outputs):
            if not self._safely(type(output).__name__, lambda: output.write(update)):  # noqa: B023 (called at once)
                self._outputs.remove(output)
                with contextlib.suppress(Exception):
                    output.close()

    def _problem(self, where: str, text: str) -> None:
        """Name what does not work, once: in the log, the run, the metrics and the report."""
        if any((known.where, known.text) == (where, text) for known in self._problems):
            return
        problem = Problem(max(self._step, 0), where, text)
        self._problems.append(problem)
        with contextlib.suppress(Exception):
            self._writer.event({"event": "problem", **asdict(problem)})

    def _safely(self, where: str, action: Callable[[], object]) -> bool:
        """House rule: a broken part is named and training goes on."""
        try:
            action()
        except Exception as error:
            self._problem(where, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return False
        return True


def _counter(monitor: weakref.ref[Monitor]) -> Callable[..., None]:
    def counted(*_: object) -> None:
        owner = monitor()
        if owner is not None:
            owner._count_step()

    # A compiled optimizer.step would trace its hooks.
    return torch.compiler.disable(counted)  # type: ignore[no-any-return]


def _closer(monitor: weakref.ref[Monitor]) -> Callable[[], None]:
    def close() -> None:
        owner = monitor()
        if owner is not None:
            owner.close()

    return close


def _run_path(run: str | os.PathLike[str] | None) -> Path:
    if run is not None:
        return Path(run)
    stem = Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    return next(path for n in range(1, 1000) if not (path := stem if n == 1 else Path(f"{stem}-{n}")).exists())


def _header(
    model: nn.Module, options: Mapping[str, Any], metrics: Sequence[Metric], rules: Sequence[Rule]
) -> dict[str, Any]:
    return {
        "attnwatch": attnwatch.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "options": dict(options),
        "metrics": [asdict(metric) for metric in metrics],
        "rules": [asdict(rule) for rule in rules],
    }
