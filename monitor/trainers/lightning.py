"""Lightning's `Trainer`: a callback, for `lightning` and for `pytorch_lightning`. Needs `attnwatch[lightning]`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnwatch.monitor.extras import need
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.trainers.attached import LOG, Attached, mean, rate

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # The same library under two names: each Trainer refuses callbacks that are none of its own.
    _names = [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.split(".")[0])]
    Callback = type("Callback", tuple(need(n, "lightning").Callback for n in _names or ["lightning.pytorch"]), {})


class AttnwatchCallback(Callback):
    """`Trainer(..., callbacks=[AttnwatchCallback(run="runs/gpt", every=20)])`: watches `fit()`.

    options: those of `attnwatch.watch` but `optimizer` and `stop_on`. Steps bear the number `trainer.global_step` has
    after them, as checkpoints do: the first is 1. on_critical: "stop" sets `trainer.should_stop` and "save" writes
    `attnwatch-step=N.ckpt` beside the other checkpoints at the step at which a critical alert begins to fire.

    Every step tells `lr`, `loss` if `training_step` returns one (the mean over accumulated batches), and `grad_norm`
    if the module logs a value of that name. Manual optimization: a batch whose `training_step` steps several optimizers
    is one step. Raises UsageError, one line: here for a wrong option, at the start of a fit as `watch` does. Nothing
    after that.
    """

    def __init__(self, *, on_critical: str = "none", **options: Any):
        super().__init__()
        self._attached = Attached(options, on_critical)
        self._kept: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._lr: dict[str, float | Tensor] = {}
        self._step = 0

    @property
    def monitor(self) -> Monitor | None:
        """That of the newest fit; None before it and on ranks other than 0."""
        return self._attached.monitor

    def close(self) -> None:
        """End the run; idempotent."""
        self._attached.close()

    # --- Lightning's events -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._kept = {}  # of a checkpoint that was loaded for a test; what belongs to a fit is loaded after this

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kept, self._kept = self._kept, {}
        self._attached.attach(pl_module, kept, is_main=trainer.is_global_zero)
        self._losses, self._lr, self._step = [], {}, trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._lr = {"lr": rate(optimizer)}  # before the scheduler moves it

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by the number of batches that it accumulates.
            batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach().reshape(()) * batches)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        losses, self._losses = self._losses, []
        if self.monitor is not None:
            logged = {name: value for name, value in trainer.callback_metrics.items() if name == "grad_norm"}
            self._attached.step(self._step, {**self._lr, **mean(losses), **logged})
        if self._attached.on_critical != "none" and self._attached.fired():
            self._act(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._attached.close(exception)

    def _act(self, trainer: Trainer) -> None:
        if self._attached.on_critical == "stop":
            trainer.should_stop = True
            return
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / f"attnwatch-step={self._step}.ckpt"
        try:
            trainer.save_checkpoint(path)
        except Exception as error:
            LOG.warning("attnwatch: the checkpoint %s could not be written: %s", path, error)

    # --- Lightning's checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._attached.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict
