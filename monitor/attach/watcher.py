"""What this process watches: a monitor for each model that is trained, fed from behind the optimizers' steps."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from attnwatch.monitor.attach.crossing import Crossing
from attnwatch.monitor.attach.finding import Trained, find, parameters_of
from attnwatch.monitor.attach.losses import Losses
from attnwatch.monitor.attach.wanted import Wanted
from attnwatch.monitor.sample import UsageError
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.trainers.attached import rate
from attnwatch.monitor.watching import watch

LOG = logging.getLogger("attnwatch")

_FREE = 3.0  # s
_SHARE = 0.01  # of the time since

SCALED = "the loss is not recorded: a GradScaler multiplies it before backward(); rules about the loss stay silent"


@dataclass
class Watched:
    """A model that is watched, or will be from the next step of its clock.

    clock: the optimizer whose steps are counted. since: the others of this model that have stepped after it.
    step: the newest finished one. loss: the newest one; a step without a backward has none.
    """

    model: nn.Module
    clock: weakref.ref[Optimizer]
    since: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    monitor: Monitor | None = None
    step: int = 0
    loss: Tensor | None = None

    def ticks(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer counts. One that steps twice while the clock stands is the new clock."""
        if optimizer in self.since:
            self.clock = weakref.ref(optimizer)
        if self.clock() is optimizer:
            self.since.clear()
            return True
        self.since.add(optimizer)
        return False


class Watcher:
    """Finds the models that are being trained and watches those that hold attention, until `close`.

    A watched model is kept until then, or until another optimizer turns up and nothing trains the model any more.
    tell: what to do with a line for the person who started this.
    """

    current: ClassVar[Watcher | None] = None

    def __init__(self, wanted: Wanted, tell: Callable[[str], None], crossing: Crossing):
        self.wanted = wanted
        self.found: tuple[str, ...] = ()
        self.failure: str | None = None
        self.begun = 0
        self.watched: list[Watched] = []
        self.crossing = crossing
        self.tell = tell
        self._scaled = False
        self._has_looked = self._has_passed = False
        self._of: weakref.WeakKeyDictionary[Optimizer, Watched | None] = weakref.WeakKeyDictionary()
        self._losses = Losses()
        self._begun_at = time.monotonic()
        self._spent = 0.0
        self.process = os.getpid()

    @property
    def reason(self) -> str:
        """Why nothing is watched, where nothing is."""
        unseen = "; no time was left to look what later optimizers train" if self._has_passed else ""
        return self.failure or f"expected a model with attention in training, found {listed(self.found)}{unseen}"

    # --- behind every step, in the thread that trains -----------------------------------------------------------------

    def start(self, optimizer: Optimizer) -> bool:
        """Look for models at the first step that is seen, and at the following ones; whether one is watched now.

        Raises UsageError when there is none to watch, and what `watch` raises.
        """
        self.follow(optimizer)
        if not self.watched:
            raise UsageError(self.reason)
        return any(each.monitor is not None for each in self.watched)

    def follow(self, optimizer: Optimizer) -> None:
        """A step of this optimizer is done. Raises what `watch` raises.

        A script may make an optimizer for every batch, to train a copy or an input: looking for what each trains
        would take longer than its training. What looks may cost is `_FREE` and `_SHARE`; the first is not counted.
        """
        loss, is_first = self._losses.take(), not self._has_looked
        if optimizer in self._of:
            self._step(optimizer, loss)
        elif is_first or self._spent <= _FREE + _SHARE * (time.monotonic() - self._begun_at):
            started = time.monotonic()
            self._look(optimizer)
            self._step(optimizer, loss)
            self._spent += 0.0 if is_first else time.monotonic() - started
        else:
            self._has_passed = True

    def _step(self, optimizer: Optimizer, loss: Tensor | None) -> None:
        watched = self._of[optimizer]
        if watched is not None and watched.ticks(optimizer):
            self._count(watched, optimizer, loss)

    def after(self, optimizer: Optimizer) -> None:
        """`follow` that never raises into training: what this optimizer trains stays unwatched when it fails."""
        try:
            self.follow(optimizer)
        except Exception as error:
            failed = self._of.get(optimizer)
            self._of[optimizer] = None
            if failed is not None and failed.monitor is None:
                self.watched.remove(failed)
            text = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            name = "a model" if failed is None else type(failed.model).__name__
            self.failure = f"{name} is not watched: {' '.join(text.split())[:300]}"
            self.tell(self.failure)

    def _look(self, optimizer: Optimizer) -> None:
        """Who trains what, now that an optimizer has come up which nobody knows."""
        is_first, self._has_looked, self._has_passed = not self._has_looked, True, False
        found, self._scaled = find()
        self.found = numbered(found)
        if is_first and self.wanted.model not in (None, *range(len(found))):
            raise UsageError(f"expected --model to be one of {listed(self.found)}, found {self.wanted.model}")
        old = {id(each.model): each for each in self.watched}
        for number, trained in enumerate(found):
            watched = old.pop(id(trained.model), None)
            chosen = self.wanted.model is None or (is_first and self.wanted.model == number)
            if watched is None and chosen and trained.has_attention and not trained.is_watched:
                watched = Watched(trained.model, weakref.ref(_clock(trained.optimizers, optimizer)))
                self.watched.append(watched)
            self._of.update(dict.fromkeys(trained.optimizers, watched))
        self._of.setdefault(optimizer, None)
        for untrained in old.values():
            self.watched.remove(untrained)
            self.tell(ended(untrained))

    def _count(self, watched: Watched, optimizer: Optimizer, loss: Tensor | None) -> None:
        if watched.monitor is None:
            self._begin(watched, optimizer)
            return
        watched.step += 1
        scalars: dict[str, Any] = {"lr": rate(optimizer)} if "lr" in optimizer.param_groups[0] else {}
        if loss is not None and loss is not watched.loss and not self._scaled:
            scalars["loss"] = watched.loss = loss
        watched.monitor.step(watched.step, **scalars)

    def _begin(self, watched: Watched, optimizer: Optimizer) -> None:
        if not self.begun:
            # Loaded at the end, its dataclasses, which are code from strings, would have Python forget that a
            # KeyboardInterrupt ended the script, and with it the exit code.
            import_module("attnwatch.reports.html")
            atexit.register(self._at_exit)
        port = self.wanted.prometheus
        watched.monitor = watch(
            watched.model,
            run=self.wanted.directory(),
            every=self.wanted.every,
            rules=self.wanted.rules,
            prometheus=port + self.begun if port else port,
            compiled=self.wanted.compiled,
            merge="none",  # the other ranks have not been asked: nothing here may wait for them
            report=False,  # written by `ended`, not in the thread that trains
        )
        self.begun += 1
        self._losses.install()
        watched.step = steps_done(optimizer) - 1
        self.tell(self.line(watched))
        if self._scaled:
            self.tell(SCALED)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> list[Watched]:
        """At a crossing, or when training is over: nothing is watched any more. What was, for `ended`."""
        self.crossing.after = None
        if Watcher.current is self:
            Watcher.current = None
        self._losses.remove()
        atexit.unregister(self._at_exit)
        watched, self.watched = self.watched, []
        self._of.clear()
        for each in watched:
            if each.monitor is not None:
                each.monitor.close()
        return watched

    def _at_exit(self) -> None:
        if os.getpid() == self.process:
            for each in self.close():
                self.tell(ended(each))

    def line(self, watched: Watched) -> str:
        """Who is watched, from which step on, and where it is recorded."""
        assert watched.monitor is not None
        name, every, run = type(watched.model).__name__, self.wanted.every, watched.monitor.run
        return f"watching {name} from step {watched.step + 1} on, every {every} steps, in {run}"


def ended(watched: Watched) -> str:
    """The run is over: its report is written. What to say of it, in one line."""
    name, monitor = type(watched.model).__name__, watched.monitor
    if monitor is None:
        return f"{name} was not watched: its optimizer took no step"
    monitor.close()
    try:
        kept = monitor.report()
    except Exception as error:
        LOG.warning("attnwatch: no report on %s: %s: %s", monitor.run, type(error).__name__, error)
        kept = monitor.run
    fired = sum(alert.fired_step is not None for alert in monitor.alerts)
    return f"{name} was watched up to step {watched.step}, {fired} alerts fired: {kept}"


def _clock(optimizers: Sequence[Optimizer], stepping: Optimizer) -> Optimizer:
    """The first, unless the one that has just stepped has the same parameters: a wrapper never steps."""
    is_same = stepping in optimizers and parameters_of(stepping) == parameters_of(optimizers[0])
    return stepping if is_same else optimizers[0]


def steps_done(optimizer: Optimizer) -> int:
    """As the optimizer counts them (Adam and its kin do); else 1, the one that has just been done."""
    counts = (state.get("step") for state in optimizer.state.values() if isinstance(state, dict))
    counted = next((x for x in counts if isinstance(x, int) or (isinstance(x, Tensor) and x.numel() == 1)), 1)
    return max(1, int(counted))


def numbered(found: Sequence[Trained]) -> tuple[str, ...]:
    """A line each for a person; keeps no model."""
    return tuple(f"{number}  {_described(each)}" for number, each in enumerate(found))


def _described(trained: Trained) -> str:
    kinds = ", ".join(type(optimizer).__name__ for optimizer in trained.optimizers)
    attention = "attention" if trained.has_attention else "no attention"
    taken = ", watched already" if trained.is_watched else ""
    return f"{type(trained.model).__name__}: {trained.parameters:,} parameters, {attention}, trained by {kinds}{taken}"


def listed(found: Sequence[str]) -> str:
    """What was found, in one line."""
    return "; ".join(found) or "none"
