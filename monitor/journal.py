"""Where a monitor's findings go: the run directory and the outputs. A part that breaks is named; the rest goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from attnwatch.monitor.alerts import Alert, TrainingStopped
from attnwatch.monitor.outputs.apart import Apart
from attnwatch.monitor.sample import Problem, Sample, Update

RUN = "run directory"
MOST = 1000
"""Problems that are named one by one."""
NO_STEP = (
    "no step was counted: training ended before its first optimizer step, or in a loop of your own neither "
    "monitor.step() was called after each nor optimizer= was passed (the one that trains it)"
)


class Output(Protocol):
    """Who is told after every step. An output that raises is switched off and named.

    A text that `write` returns is a problem that the output goes on after: named once. A thread of its own tells each,
    so that training waits for none; one with a true attribute `quick` says that its `write` only hands over, or has to
    happen between the trainer's own calls, and is told in the trainer's thread.
    """

    def write(self, update: Update) -> str | None: ...

    def close(self) -> None: ...


class News(NamedTuple):
    """What rank 0 tells the others. stop: why all of them stop now."""

    run: str = ""
    alerts: tuple[Alert, ...] = ()
    stop: Alert | None = None


class Writer(Protocol):
    """Where a run is recorded."""

    @property
    def path(self) -> Path: ...

    @property
    def lost(self) -> Mapping[str, int]: ...

    def sample(self, sample: Sample) -> None: ...

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Elsewhere:
    """A run that another process records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: dict[str, int] = {}

    def sample(self, sample: Sample) -> None: ...

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Records and tells; nothing here raises. problems: what does not work, each said once, at the newest `step`.
    exception: the type of the one that ended training, "" for none."""

    def __init__(self, writer: Writer, outputs: Sequence[Output]) -> None:
        self.path = writer.path
        self.outputs = list(outputs)
        self.problems: list[Problem] = []
        self.step = 0
        self.exception = ""
        self._writer = writer
        self._recorded = 0  # of the problems
        self._failed: set[tuple[str, type[Exception]]] = set()

    def sample(self, sample: Sample) -> None:
        self.safely(RUN, lambda: self._writer.sample(sample))

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self.safely(RUN, lambda: self._writer.scalars(step, numbers))

    def event(self, name: str, step: int, content: Mapping[str, Any]) -> None:
        self.safely(RUN, lambda: self._writer.event({"event": name, "step": step, **content}))

    def alert(self, alert: Alert) -> None:
        """Pending ones come and go; the run keeps what fired."""
        if alert.fired_step is not None:
            step = alert.fired_step if alert.resolved_step is None else alert.resolved_step
            self.event("alert", step, asdict(alert))

    def tell(self, update: Update) -> None:
        for output in list(self.outputs):
            if not self.safely(_name(output), lambda: self._told(output, update)):  # noqa: B023 (called at once)
                self.outputs.remove(output)
                with contextlib.suppress(Exception):
                    output.close()

    def _told(self, output: Output, update: Update) -> None:
        text = output.write(update)
        if isinstance(text, str):
            self.problem(_name(output), text)

    def problem(self, where: str, text: str) -> None:
        """Name what does not work: in the run at once, to the outputs with the next update."""
        if len(self.problems) >= MOST:  # texts may differ by an address or a time without end
            where, text = "monitor", f"{MOST} problems are named, further ones are not"
        if not any((known.where, known.text) == (where, text) for known in self.problems):
            self.problems.append(Problem(self.step, where, text))
            self._record_problems()

    def safely(self, where: str, action: Callable[[], object]) -> bool:
        """Whether the action worked. Of one part the first failure of a kind is named: the next ones only repeat it."""
        try:
            action()
        except Exception as error:
            if (where, type(error)) not in self._failed:
                self._failed.add((where, type(error)))
                self.problem(where, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return False
        return True

    def blame(self, kind: type[BaseException] | None) -> None:
        """What training was left by; None: by nothing. `sys.exit`, and a stop that was asked for, break nothing."""
        if kind is not None and not issubclass(kind, SystemExit | TrainingStopped):
            self.exception = kind.__name__

    def end(self, step: int, content: Mapping[str, Any]) -> None:
        """The last event: what the disk refused is counted, and what ended training is named."""
        if self._writer.lost:
            lost = ", ".join(f"{count} {what}" for what, count in self._writer.lost.items())
            self.problem(RUN, f"{lost} could not be written: they are lost")
        self.event("end", step, {**content, "exception": self.exception})

    def close(self) -> None:
        self._record_problems()
        self.safely(RUN, self._writer.close)

    def dismiss(self) -> None:
        """Close the outputs, the newest first; the first of all, the log, is told what came up there."""
        for output in self.outputs:
            if isinstance(output, Apart):
                output.end()  # all at once: one that hangs takes no time from the others
        while len(self.outputs) > 1:
            output = self.outputs.pop()
            # An exporter's `close` says that the run was finished: one that an exception ended is only gone.
            close = getattr(output, "discard", output.close) if self.exception else output.close
            self.safely(_name(output), close)

    def _record_problems(self) -> None:
        """What a full disk refused is tried again with the next problem, and at the end."""
        with contextlib.suppress(Exception):
            while self._recorded < len(self.problems):
                self._writer.event({"event": "problem", **asdict(self.problems[self._recorded])})
                self._recorded += 1


def _name(output: Output) -> str:
    return output.name if isinstance(output, Apart) else type(output).__name__
