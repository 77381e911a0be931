"""`AttnwatchCallback` under the real Lightning Trainer, by both of its names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import tiny
from torch import Tensor
from torch.utils.data import DataLoader

from attnwatch import open_run
from attnwatch.monitor.trainers.lightning import AttnwatchCallback

LIGHTNING = import_module("lightning.pytorch")  # after tests.tiny, which puts torchvision in order

# Its advice on workers, loaders and folders (the models here are tiny on purpose), and what it still calls in torch.
_IGNORED = "ignore:.*(does not have many workers|no `val_dataloader`|is not empty|not resumable|LeafSpec)"
pytestmark = pytest.mark.filterwarnings(_IGNORED)


def schedule(step: int) -> float:
    """What step `step`, from 0, multiplies the rate of 0.06 by: 0.06, 0.05, 0.04, ..."""
    return 1 - step / 6


def module_of(library: Any = LIGHTNING, manual: bool = False, logs: bool = False) -> Any:
    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.llama()
            self.automatic_optimization = not manual
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            if manual:
                self.manual_backward(loss)
                if index % 2:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if logs:
                self.log("grad_norm", torch.tensor(float(self.trainer.global_step)))

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.06)
            by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
            return [optimizer], [{"scheduler": by_step, "interval": "step"}]

    return Module()


def trainer(folder: Path, *callbacks: Any, library: Any = LIGHTNING, **arguments: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    steps = {"max_epochs": 1, "enable_checkpointing": False, "default_root_dir": folder}
    return library.Trainer(callbacks=list(callbacks), **{**quiet, **steps, **arguments})


def rows(count: int = 24, batch: int = 4, seed: int = 1) -> Any:
    return DataLoader(tiny.texts(count, seed), batch_size=batch)  # type: ignore[arg-type]


# --- what is seen when ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_both_names_of_the_library(name: str, tmp_path: Path) -> None:
    """Each Trainer takes only callbacks of its own name."""
    library = import_module(name)
    callback = AttnwatchCallback(run=tmp_path / "run", every=2, report=False)
    model = module_of(library, logs=True)
    trainer(tmp_path, callback, library=library).fit(model, rows())
    run = open_run(tmp_path / "run")
    assert run.ended
    assert run.problems == ()
    assert run.layers == ("model.model.layers.0.self_attn", "model.model.layers.1.self_attn")
    assert run.steps.tolist() == [1, 3, 5]
    steps, losses = run.scalar("loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(losses, model.losses)
    np.testing.assert_allclose(run.scalar("lr")[1], [0.06, 0.05, 0.04, 0.03, 0.02, 0.01])
    assert run.scalar("grad_norm")[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert tiny.hooks(model) == 0


def test_an_accumulated_step_is_the_step_of_its_whole_batch(tmp_path: Path) -> None:
    whole = AttnwatchCallback(run=tmp_path / "whole", **tiny.ALL_ROWS)
    trainer(tmp_path, whole).fit(module_of(), rows(20))
    parts = AttnwatchCallback(run=tmp_path / "parts", **tiny.ALL_ROWS)
    model = module_of()
    trainer(tmp_path, parts, accumulate_grad_batches=4).fit(model, rows(20, batch=1))
    found, expected = open_run(tmp_path / "parts"), open_run(tmp_path / "whole")
    assert found.problems == ()
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    for name in ("entropy", "logit_max", "logit_spread", "sink_mass", "qk_rank", "map_rank"):
        np.testing.assert_allclose(found.metric(name), expected.metric(name), rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(found.scalar("loss")[1], np.reshape(model.losses, (5, 4)).mean(1), rtol=1e-6)


def test_the_last_batches_of_an_epoch_are_a_step_too(tmp_path: Path) -> None:
    """Two batches where four are accumulated: their loss is their mean."""
    callback = AttnwatchCallback(run=tmp_path / "run", **tiny.ALL_ROWS)
    model = module_of()
    trainer(tmp_path, callback, accumulate_grad_batches=4).fit(model, rows())
    steps, losses = open_run(tmp_path / "run").scalar("loss")
    assert steps.tolist() == [1, 2]
    np.testing.assert_allclose(losses, [np.mean(model.losses[:4]), np.mean(model.losses[4:])], rtol=1e-6)


def test_manual_optimization_counts_its_own_steps(tmp_path: Path) -> None:
    """Here every second batch steps; the rate is that of the optimizer, whose scheduler nobody calls."""
    callback = AttnwatchCallback(run=tmp_path / "run", **tiny.ALL_ROWS)
    model = module_of(manual=True)
    trainer(tmp_path, callback).fit(model, rows())
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 2, 3]
    assert run.problems == ()
    np.testing.assert_allclose(run.scalar("loss")[1], np.reshape(model.losses, (3, 2)).mean(1), rtol=1e-6)
    np.testing.assert_allclose(run.scalar("lr")[1], [0.06] * 3)


def test_several_optimizers_of_a_batch_are_one_step(tmp_path: Path) -> None:
    """Lightning counts the steps of each: 2 after the first batch. Here the second model steps at every third one."""

    class Two(LIGHTNING.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.often, self.rarely = tiny.llama(), tiny.llama()

        def training_step(self, batch: Any, index: int) -> None:
            models = [self.often, self.rarely]
            for model, optimizer in list(zip(models, self.optimizers(), strict=True))[: 1 if index % 3 else 2]:
                self.toggle_optimizer(optimizer)
                self.manual_backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.often.parameters(), lr=0.06), torch.optim.SGD(self.rarely.parameters(), 0.02)]

    trainer(tmp_path, AttnwatchCallback(run=tmp_path / "run", every=3, report=False)).fit(Two(), rows())
    run = open_run(tmp_path / "run")
    assert run.problems == ()
    assert run.steps.tolist() == [2, 6]  # batches 0 and 3: both models stepped
    assert run.layers == tuple(f"{name}.model.layers.{n}.self_attn" for name in ("often", "rarely") for n in range(2))
    steps, rates = run.scalar("lr")
    assert dict(zip(steps.tolist(), rates.tolist(), strict=True)) == {
        2: 0.02,
        3: 0.06,
        4: 0.06,
        6: 0.02,
        7: 0.06,
        8: 0.06,
    }


def test_training_is_bit_for_bit_what_it_was(tmp_path: Path) -> None:
    watched, plain = module_of(), module_of()
    trainer(tmp_path, AttnwatchCallback(run=tmp_path / "run", every=2, report=False)).fit(watched, rows())
    trainer(tmp_path).fit(plain, rows())
    assert tiny.same(tiny.weights(watched), tiny.weights(plain))
    assert watched.losses == plain.losses


def test_validation_leaves_no_trace(tmp_path: Path) -> None:
    """Neither the one before training that checks the code, nor those in the middle of an epoch."""
    alone = AttnwatchCallback(run=tmp_path / "alone", **tiny.ALL_ROWS)
    trainer(tmp_path, alone).fit(module_of(), rows(16))
    between = AttnwatchCallback(run=tmp_path / "between", **tiny.ALL_ROWS)
    validating = trainer(tmp_path, between, val_check_interval=1, num_sanity_val_steps=2)
    validating.fit(module_of(), rows(16), rows(8, seed=5))
    found, expected = open_run(tmp_path / "between"), open_run(tmp_path / "alone")
    assert found.problems == ()
    tiny.assert_samples(found, expected)
    assert found.scalar("loss")[1].tolist() == expected.scalar("loss")[1].tolist()


def test_a_step_that_the_scaler_skips_is_a_step(tmp_path: Path) -> None:
    """fp16 with Lightning's own plugin, on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = LIGHTNING.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    callback = AttnwatchCallback(run=tmp_path / "run", spectrum_every=1, **tiny.ALL_ROWS)
    model = module_of()
    tiny.overflow(model.model, at=1)
    trainer(tmp_path, callback, plugins=[plugin]).fit(model, rows(16))
    assert scaler.get_scale() == 2.0**9  # one step was skipped
    run = open_run(tmp_path / "run")
    assert [layer.dtype for layer in run.coverage] == ["float16"] * 2
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert run.problems == ()
    assert run.alerts == ()
    assert np.isfinite(run.scalar("loss")[1]).all()
    assert (run.metric("nonfinite") == 0).all()
    update = run.metric("update_ratio")
    assert (update > 0).all((1, 2)).tolist() == [True, False, True, True]
    assert np.isnan(update[1]).all()  # nothing changed


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    """Steps are counted on, no alert is repeated or forgotten."""
    rules = tiny.rule_file(tmp_path / "rules.toml", 0.055, 0.025)  # they fire at steps 2 and 5
    options = {"run": tmp_path / "run", "rules": rules, "every": 2, "spectrum_every": 1, "report": False}
    for resumed in (None, tmp_path / "step=3.ckpt"):
        saving = LIGHTNING.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        fitting = trainer(tmp_path, AttnwatchCallback(**options), saving, enable_checkpointing=True)
        fitting.fit(module_of(), rows(), ckpt_path=resumed)
    first, second = open_run(tmp_path / "run"), open_run(tmp_path / "run-2")
    assert first.steps.tolist() == [1, 3, 5]
    assert second.steps.tolist() == [5]
    assert second.scalar("loss")[0].tolist() == [4, 5, 6]
    assert [(alert.rule, alert.fired_step) for alert in first.alerts] == [("below_0", 2), ("below_1", 5)]
    assert [(alert.rule, alert.fired_step) for alert in second.alerts] == [("below_0", 2), ("below_1", 5)]


def test_a_checkpoint_that_was_loaded_for_a_test_is_no_past_of_the_next_fit(tmp_path: Path) -> None:
    callback = AttnwatchCallback(run=tmp_path / "run", rules=[tiny.below(0.055)], every=4, report=False)
    trainer(tmp_path, callback).fit(module := module_of(), rows())
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")
    module.test_step = module.validation_step
    trainer(tmp_path, callback).test(module, rows(), ckpt_path=tmp_path / "after.ckpt", verbose=False)
    trainer(tmp_path, callback).fit(module_of(), rows())
    for run in (open_run(tmp_path / "run"), open_run(tmp_path / "run-2")):
        assert run.steps.tolist() == [1, 5]
        assert [(alert.rule, alert.fired_step) for alert in run.alerts] == [("below_0.055", 2)]


def test_another_fit_is_another_run(tmp_path: Path) -> None:
    callback = AttnwatchCallback(run=tmp_path / "run", every=4, report=False)
    fitting, model = trainer(tmp_path, callback), module_of()
    fitting.fit(model, rows())
    fitting.fit_loop.max_epochs = 2
    fitting.fit(model, rows())
    assert open_run(tmp_path / "run").steps.tolist() == [1, 5]
    assert open_run(tmp_path / "run-2").steps.tolist() == [7, 11]
    assert open_run(tmp_path / "run-2").scalar("loss")[0].tolist() == [7, 8, 9, 10, 11, 12]


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_an_exception_ends_the_run(tmp_path: Path) -> None:
    class Breaks(LIGHTNING.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise OSError("the disk is gone")

    callback, model = AttnwatchCallback(run=tmp_path / "run", every=1), module_of()
    with pytest.raises(OSError, match="the disk is gone"):
        trainer(tmp_path, callback, Breaks()).fit(model, rows())
    run = open_run(tmp_path / "run")
    assert run.ended
    assert run.steps.tolist() == [1, 2]
    assert run.scalar("loss")[0].tolist() == [1, 2]
    assert (tmp_path / "run" / "report.html").exists()
    assert tiny.hooks(model) == 0


def test_a_critical_alert_stops_training(tmp_path: Path) -> None:
    """At the step at which it fires; a warning does not."""
    rules = [tiny.below(0.055, "warning"), tiny.below(0.035)]
    fitting = trainer(tmp_path, AttnwatchCallback(on_critical="stop", run=tmp_path / "run", rules=rules, report=False))
    fitting.fit(module_of(), rows())
    assert fitting.global_step == 4
    run = open_run(tmp_path / "run")
    assert [(alert.severity, alert.fired_step) for alert in run.alerts] == [("warning", 2), ("critical", 4)]


def test_a_critical_alert_saves_a_checkpoint(tmp_path: Path) -> None:
    """Once, at the step at which it fires, beside the others; training goes on, and from there a fit can."""
    options: dict[str, Any] = {"run": tmp_path / "run", "rules": [tiny.below(0.035)], "report": False}
    fitting = trainer(tmp_path / "out", AttnwatchCallback(on_critical="save", **options))
    fitting.fit(module_of(), rows())
    assert fitting.global_step == 6
    assert [path.name for path in (tmp_path / "out").glob("*.ckpt")] == ["attnwatch-step=4.ckpt"]
    again = trainer(tmp_path / "out", AttnwatchCallback(on_critical="save", **options))
    again.fit(module_of(), rows(), ckpt_path=tmp_path / "out" / "attnwatch-step=4.ckpt")
    resumed = open_run(tmp_path / "run-2")
    assert resumed.scalar("loss")[0].tolist() == [5, 6]
    assert [alert.fired_step for alert in resumed.alerts] == [4]


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    options: dict[str, Any] = {"run": tmp_path / "run", "rules": [tiny.below(0.035)], "report": False}
    fitting = trainer(tmp_path / "out", AttnwatchCallback(on_critical="save", **options))
    fitting.fit(module_of(), rows())
    assert fitting.global_step == 6
    assert "attnwatch-step=4.ckpt could not be written" in caplog.text
