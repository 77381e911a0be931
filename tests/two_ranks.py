"""One of two processes that train together until an alert: by a loop of Accelerate's, the Trainer and Lightning."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tests import tiny
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from attnwatch import Rule
from attnwatch.monitor.trainers import huggingface, lightning
from attnwatch.monitor.trainers.accelerate import AttnwatchTracker

Fitting, LightningModule = import_module("lightning").Trainer, import_module("lightning").LightningModule
TorchElasticEnvironment = import_module("lightning.pytorch.plugins.environments").TorchElasticEnvironment

STEPS = 12
LOW: dict[str, Any] = {"rules": [tiny.below(0.059)], "report": False}


def loop(run: Path) -> int:
    """Steps done. The alert fires at step 4; it is asked for after every step, and told at the first, 4th, 7th, ..."""
    tracker = AttnwatchTracker(run=run, every=3, rules=[Rule("late", "critical", "scalar.mark >= 4")], report=False)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    plain = tiny.llama()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    accelerator.init_trackers("tiny")
    tracker.watch(accelerator, model, optimizer)
    rows = tiny.texts(STEPS, seed=accelerator.process_index)
    for step in range(STEPS):
        loss = model(**{name: row[None] for name, row in rows[step].items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss, "mark": step})
        if tracker.fired():
            break
    tracker.finish()
    return step + 1


def trainer(run: Path) -> int:
    """Steps done. The rate falls from 0.06 by 0.005 a step: the alert fires at the second, and is told at the 4th."""
    callback = huggingface.AttnwatchCallback(on_critical="stop", run=run, every=3, **LOW)
    arguments = TrainingArguments(
        output_dir=str(run.parent / "out"), max_steps=STEPS, learning_rate=0.06, use_cpu=True, report_to=[],
        per_device_train_batch_size=1, save_strategy="no", disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    trained = Trainer(tiny.llama(), arguments, train_dataset=tiny.texts(24), callbacks=[callback])
    trained.train()
    return trained.state.global_step


def fit(run: Path) -> int:
    """Steps done. The same rates as the Trainer's."""

    class Module(LightningModule):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.llama()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.06)
            falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
            return [optimizer], [{"scheduler": falling, "interval": "step"}]

    callback = lightning.AttnwatchCallback(on_critical="stop", run=run, every=3, **LOW)
    fitting = Fitting(
        accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()], max_steps=STEPS,
        callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    fitting.fit(Module(), DataLoader(tiny.texts(2 * STEPS), batch_size=1))  # type: ignore[arg-type]
    return fitting.global_step


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    done = {name.__name__: name(folder / f"{name.__name__}-run") for name in (loop, trainer, fit)}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(done))
    torch.distributed.destroy_process_group()
