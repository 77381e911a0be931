"""Accelerate: a tracker that also watches. Needs `attnwatch[accelerate]`.

Accelerate has no callbacks: the loop is yours, and so is what happens on an alert. The optimizer counts the steps,
`accelerator.log` tells of the loss, `accelerator.save_state` keeps the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnwatch.monitor.extras import need
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.trainers.attached import Attached

if TYPE_CHECKING:
    GeneralTracker = object  # accelerate has no types
else:
    GeneralTracker = need("accelerate.tracking", "accelerate").GeneralTracker


class AttnwatchTracker(GeneralTracker):
    """`Accelerator(log_with=AttnwatchTracker(run="runs/gpt", every=20))`, then `watch` after `prepare`.

    options: those of `attnwatch.watch` but `optimizer` and `stop_on`. Raises UsageError, one line, for a wrong option,
    and from `watch`. Nothing after that.
    """

    name = "attnwatch"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, **options: Any):
        super().__init__()
        self._attached = Attached(options)
        self._accelerator: Any = None

    @property
    def tracker(self) -> Monitor | None:
        """The monitor; None before `watch` and on other processes than the main one."""
        return self._attached.monitor

    def watch(self, accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Monitor | None:
        """Attach to the prepared model; call it in every process, before the first step and before `load_state`.

        The prepared optimizer counts from 0: batches that are accumulated before it steps are one step, and a step
        that a gradient scaler skips is none. From now on `accelerator.save_state` and `load_state` hold the state.
        """
        if self._accelerator is not accelerator:
            accelerator.register_for_checkpointing(self)
        self._accelerator = accelerator
        inner = getattr(optimizer, "optimizer", optimizer)
        self._attached.attach(accelerator.unwrap_model(model), is_main=accelerator.is_main_process, optimizer=inner)
        return self.tracker

    def fired(self) -> bool:
        """Whether a critical alert began to fire since this said so last: a loop may save or stop then.

        Ask once an optimizer step, in every process. All get the same answer; several processes wait for it at the
        first question and then at every `every`-th.
        """
        return self._attached.fired()

    # --- what Accelerate calls ----------------------------------------------------------------------------------------

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """A run keeps the options of the watching only."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Scalars of the newest step, after `optimizer.step()`: `loss`, `grad_norm`, `lr` or any other.

        The optimizer knows its step better than `step`. What is no number is left to other trackers, and so is what
        belongs to a step that the gradient scaler skipped. Never raises.
        """
        if self.tracker is None or self._accelerator.optimizer_step_was_skipped:
            return
        numbers: dict[str, Any] = {name: x for name, x in values.items() if isinstance(x, Real | Tensor)}
        self._attached.step(None, numbers)

    def finish(self) -> None:
        """End the run; idempotent."""
        self._attached.close()

    def state_dict(self) -> dict[str, Any]:
        return self._attached.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. In the middle of a loop that goes back to a checkpoint a new run begins."""
        self._attached.resume(state)
