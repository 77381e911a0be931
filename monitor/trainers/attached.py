"""What every trainer needs of a monitor: attach it on rank 0, resume it, and ask in all processes whether to act."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnwatch.hooks.ranks import several
from attnwatch.monitor.conditions import closest
from attnwatch.monitor.run import as_path
from attnwatch.monitor.sample import Update, UsageError
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.watching import watch

LOG = logging.getLogger("attnwatch")

ACTIONS = ("none", "save", "stop")
"""What `on_critical` may ask of a trainer when a critical alert begins to fire."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_REFUSED = {
    "optimizer": "leave it out: the trainer's own steps are counted",
    "stop_on": "a trainer stops by its own control: say on_critical= where it has one",
}

_OPTIONS = [name for name in signature(watch).parameters if name not in ("model", *_REFUSED)]


class Attached:
    """The monitor of one training run, then that of the next one: a trainer may fit several times.

    options: those of `attnwatch.watch` but `optimizer` and `stop_on`. A directory `run` that holds something is left
    alone, and the next free one of `run-2`, `run-3`, ... is used: a job that was requeued comes with the same options.
    Raises UsageError, one line, for an option that is none.
    """

    def __init__(self, options: Mapping[str, Any], on_critical: str = "none"):
        for name in options:
            if name in _REFUSED:
                raise UsageError(f"expected options of watch() but {name}, found {name}; {_REFUSED[name]}")
            if name not in _OPTIONS:
                there = ", ".join(closest(name, _OPTIONS))
                raise UsageError(f"expected options of watch(), found {name}; there are (closest first): {there}")
        if on_critical not in ACTIONS:
            raise UsageError(f"expected on_critical to be one of {', '.join(ACTIONS)}, found {on_critical!r}")
        self.options = dict(options)
        self.on_critical = on_critical
        self.monitor: Monitor | None = None
        self._target: tuple[nn.Module, torch.optim.Optimizer | None] | None = None
        self._critical = _Critical()
        self._asked = 0

    def attach(
        self,
        model: nn.Module,
        state: Mapping[str, Any] | None = None,
        *,
        is_main: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Begin a run, and end the one before. state: what `state_dict` gave; one that does not fit is named in the
        log, and the run begins anew. optimizer: counts the steps, instead of `step`. Raises UsageError as `watch`."""
        self.close()
        self._asked = 0
        self._critical = _Critical()
        together = several()
        if not is_main and not together:
            return
        options = dict(self.options)
        if options.get("run") is not None:
            chosen = [_free(as_path(options["run"], "run")) if is_main else None]
            if together:
                dist.broadcast_object_list(chosen, src=0)
            options["run"] = chosen[0]
        if isinstance(options.get("outputs", []), list | tuple):  # if not, watch says what is wrong
            options["outputs"] = [*options.get("outputs", []), self._critical]
        self.monitor = watch(unwrap(model), optimizer=optimizer, **options)
        self._target = model, optimizer
        if state:
            self._load(self.monitor, state)

    def step(self, number: int | None, scalars: Mapping[str, float | Tensor]) -> None:
        """Optimizer step `number` is done (None where the optimizer counts), and what is known of it. Never raises."""
        if self.monitor is not None:
            self.monitor.step(number, **{name: x for name, x in scalars.items() if name not in ("self", "step")})

    def fired(self) -> bool:
        """Whether a critical alert began to fire since this said so last. The same answer in every process.

        Ask once a step, in all processes. Rank 0 knows; where there are several, it tells them at the first question
        and then at every `every`-th, and nothing waits in between.
        """
        self._asked += 1
        every = int(self.options.get("every", 20))
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            answer = self._critical.fired
        elif self._asked % every != 1 % every:
            return False
        else:
            told = [self._critical.fired]
            dist.broadcast_object_list(told, src=0)
            answer = told[0]
        if answer:
            self._critical.fired = False
        return answer

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as data for JSON or `torch.save`; empty where nothing is watched. Never raises."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, right after `attach` or in the middle of a run: a loop that went back to a checkpoint
        gets a new run, which begins with the alerts of then."""
        if self.monitor is None or self._target is None or not state:
            return
        if self.monitor.state_dict()["counts"]["finished"]:
            model, optimizer = self._target
            self.attach(model, state, optimizer=optimizer)
        else:
            self._load(self.monitor, state)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, whose training `error` ended; idempotent. Its monitor can still be read."""
        self._target = None
        if self.monitor is not None:
            self.monitor.__exit__(None if error is None else type(error), error, None)

    def _load(self, monitor: Monitor, state: Mapping[str, Any]) -> None:
        try:
            monitor.load_state_dict(state)
        except UsageError as error:  # training goes on all the same: nobody could repair the checkpoint
            LOG.warning("attnwatch: the checkpoint's state does not fit, and watching begins anew: %s", error)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers."""
    while isinstance(model, _WRAPPERS):
        model = model.module
    return model


def rate(optimizer: torch.optim.Optimizer) -> float | Tensor:
    """Learning rate of its first group, as it is now: some schedulers change a tensor in place."""
    lr: float | Tensor = optimizer.param_groups[0]["lr"]
    return lr.clone() if isinstance(lr, Tensor) else lr


def mean(losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """`loss`, the mean over the micro-batches of a step, on their device; nothing if there were none."""
    return {"loss": torch.stack([loss.float() for loss in losses]).mean()} if losses else {}


class _Critical:
    """An output: it is told of every alert at the step that it fires."""

    quick = True

    def __init__(self) -> None:
        self.fired = False

    def write(self, update: Update) -> None:
        self.fired |= any((alert.severity, alert.state) == ("critical", "firing") for alert in update.changed)

    def close(self) -> None:
        """Nothing is held."""


def _free(path: Path) -> Path:
    """The path, or the first of `path-2`, `path-3`, ... where nothing is."""
    names = chain([path], (Path(f"{path}-{n}") for n in count(2)))
    return next(each for each in names if not each.exists() or (each.is_dir() and not os.listdir(each)))
