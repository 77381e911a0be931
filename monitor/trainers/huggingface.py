"""Hugging Face `Trainer`: a callback. Needs `attnwatch[hf]`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnwatch.hooks.inert import Enter
from attnwatch.monitor.extras import need
from attnwatch.monitor.outputs.prometheus import Prometheus
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.trainers.attached import LOG, Attached, mean, rate

if TYPE_CHECKING:
    from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments
else:
    _library = need("transformers.trainer_callback", "hf")
    TrainerCallback, ExportableState = _library.TrainerCallback, _library.ExportableState


class AttnwatchCallback(TrainerCallback, ExportableState):
    """`Trainer(..., callbacks=[AttnwatchCallback(run="runs/gpt", every=20)])`: watches `train()`.

    options: those of `attnwatch.watch` but `optimizer` and `stop_on`. Steps bear the Trainer's own numbers: the first
    is 1, as in its logs and checkpoints. on_critical: "stop" ends training and "save" writes a checkpoint at the step
    at which a critical alert begins to fire, by the Trainer's own control.

    Every step tells `lr`, and `loss` if the model's forward returns one; steps that the Trainer logs tell `grad_norm`
    too, and its averaged loss where the model returned none. The state is in the Trainer's checkpoints. The Trainer
    tells nobody of an exception: the run is then ended by `close()`, the next `train()` or the end of the process.
    Raises UsageError, one line: here for a wrong option, at the start of training as `watch` does. Nothing after that.
    """

    def __init__(self, *, on_critical: str = "none", **options: Any):
        if isinstance(options.get("prometheus"), Mapping):  # as `state` keeps it
            options["prometheus"] = Prometheus(**options["prometheus"])
        self._attached = Attached(options, on_critical)
        self._losses = Losses()
        self._hook: RemovableHandle | None = None
        self._scalars: dict[str, float | Tensor] = {}
        self._waits = False  # for the numbers that the Trainer logs of this step
        self.lost: list[str] = []
        """Options that did not survive in a checkpoint, where the Trainer made this callback from one."""

    @property
    def monitor(self) -> Monitor | None:
        """That of the newest training; None before it and on ranks other than 0."""
        return self._attached.monitor

    def close(self) -> None:
        """End the run; idempotent."""
        if self._hook is not None:
            self._hook.remove()
        self._attached.close()

    # --- the Trainer's events ---------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        model: nn.Module = kwargs["model"]
        kept_states: Any = state.stateful_callbacks  # a dict by now
        kept = kept_states.get(type(self).__name__) if state.global_step else None
        # The Trainer saves into the entry of every callback, and has none when the checkpoint knew no such callback.
        kept_states.setdefault(type(self).__name__, self.state())
        if self.lost:
            names = ", ".join(self.lost)
            LOG.warning("attnwatch: the Trainer restored its callback from a checkpoint, which cannot hold %s", names)
        resumed = kept.get("monitor") if isinstance(kept, dict) else None
        self._attached.attach(model, resumed, is_main=state.is_world_process_zero)
        self._losses, self._scalars, self._waits = Losses(), {}, False
        if self.monitor is not None and args.n_gpu <= 1:  # not among the threads of nn.DataParallel
            self._hook = model.register_forward_hook(self._losses, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self._finish(state, control) if self._waits else control  # another callback called the logging off

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._scalars = {"lr": rate(kwargs["optimizer"])}  # before the scheduler moves it

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        alike = args.world_size if args.average_tokens_across_devices else 1
        self._scalars |= self._losses.take(alike)
        self._waits = control.should_log  # on_log comes next
        return control if self._waits else self._finish(state, control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        logs: Mapping[str, float] = kwargs["logs"]
        if not self._waits:
            return control
        if "grad_norm" in logs:
            self._scalars["grad_norm"] = logs["grad_norm"]
        if "loss" in logs:
            self._scalars.setdefault("loss", logs["loss"])
        return self._finish(state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._waits:
            self._finish(state, control)
        self.close()

    def _finish(self, state: TrainerState, control: TrainerControl) -> TrainerControl:
        self._waits = False
        self._attached.step(state.global_step, self._scalars)
        if self._attached.on_critical != "none" and self._attached.fired():
            control.should_save |= self._attached.on_critical == "save"
            control.should_training_stop |= self._attached.on_critical == "stop"
        return control

    # --- the Trainer's checkpoints ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the Trainer keeps in `trainer_state.json`.

        args and attributes: of the callback that it makes when `restore_callback_states_from_checkpoint` is set;
        monitor: read at the start of a resumed training, whether or not that is set.
        """
        plain = {"on_critical": self._attached.on_critical}
        lost = list(self.lost)
        for name, value in self._attached.options.items():
            try:
                plain[name] = json.loads(json.dumps(value, default=_plain))
            except (TypeError, ValueError):
                lost.append(name)
        return {"args": plain, "attributes": {"lost": lost}, "monitor": self._attached.state_dict()}


def _plain(value: Any) -> Any:
    """What JSON can hold of an option. Raises TypeError for one of which it can hold nothing."""
    return asdict(value) if isinstance(value, Prometheus) else os.fspath(value)


class Losses:
    """A forward hook: what the model's training forwards of one optimizer step say of the loss."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._shares = False

    def __call__(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        if isinstance(output, tuple):  # then the Trainer, too, takes the first for the loss; logits have axes
            loss = output[0] if output and getattr(output[0], "ndim", None) == 0 else None
        else:
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))
            # Then each is a sum over its tokens, divided by the number of all tokens of the step.
            self._shares = kwargs.get("num_items_in_batch") is not None

    def take(self, alike: int) -> dict[str, Tensor]:
        """`loss` of the step, a 0-d tensor on its device; empty if no forward returned one.

        alike: processes over whose tokens, too, the model's loss was averaged."""
        losses, self._losses = self._losses, []
        factor = len(losses) * alike if self._shares else 1
        return {name: loss * factor for name, loss in mean(losses).items()}

    # Copies of the model do not take it along, as with all hooks of ours.
    __deepcopy__ = Enter.__deepcopy__
    __reduce__ = Enter.__reduce__
