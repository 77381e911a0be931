"""`AttnwatchCallback` under the real Hugging Face Trainer: steps, scalars, evaluation, resume, exceptions, actions."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import tiny
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnwatch import Prometheus, UsageError, open_run
from attnwatch.monitor.trainers.huggingface import AttnwatchCallback, Losses


def trainer(
    folder: Path, *callbacks: TrainerCallback, data: Any = None, evaluated: Any = None, **arguments: Any
) -> Trainer:
    """Six steps of four rows at 0.06, 0.05, ... 0.01; nothing is logged or saved unless asked for."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3}
    steps = {"max_steps": 6, "learning_rate": 0.06, "per_device_train_batch_size": 4, "save_strategy": "no"}
    given = TrainingArguments(output_dir=str(folder), **{**quiet, **steps, **arguments})
    rows = tiny.texts(24) if data is None else data
    return Trainer(tiny.llama(), given, train_dataset=rows, eval_dataset=evaluated, callbacks=list(callbacks))


def logged(trained: Trainer, name: str) -> dict[int, float]:
    return {entry["step"]: entry[name] for entry in trained.state.log_history if name in entry}


class Broken(list[dict[str, Tensor]]):
    """Data of which one row cannot be read."""

    def __getitem__(self, at: Any) -> Any:
        if at == 13:
            raise OSError("row 13 is gone")
        return super().__getitem__(at)


# --- what is seen when ------------------------------------------------------------------------------------------------


def test_an_accumulated_step_is_the_step_of_its_whole_batch(tmp_path: Path) -> None:
    """One sample an optimizer step, of all its micro-batches, with the Trainer's own loss, gradient norm and rate."""
    whole = AttnwatchCallback(run=tmp_path / "whole", **tiny.ALL_ROWS)
    trainer(tmp_path, whole, optim="sgd").train()
    parts = AttnwatchCallback(run=tmp_path / "parts", **tiny.ALL_ROWS)
    micro = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "logging_steps": 1}
    accumulating = trainer(tmp_path, parts, optim="sgd", **micro)
    accumulating.train()
    found, expected = open_run(tmp_path / "parts"), open_run(tmp_path / "whole")
    assert found.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.problems == ()
    for name in ("entropy", "logit_max", "logit_spread", "sink_mass", "qk_rank", "map_rank"):
        np.testing.assert_allclose(found.metric(name), expected.metric(name), rtol=1e-3, err_msg=name)
    for name in ("loss", "grad_norm"):
        steps, values = found.scalar(name)
        assert steps.tolist() == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose(values, list(logged(accumulating, name).values()), rtol=1e-6)
    np.testing.assert_allclose(found.scalar("lr")[1], [0.06, 0.05, 0.04, 0.03, 0.02, 0.01])


def test_every_step_tells_the_loss_and_logged_ones_the_gradient_norm(tmp_path: Path) -> None:
    """The Trainer logs the mean of two losses where every step told its own."""
    callback = AttnwatchCallback(run=tmp_path / "run", every=4, report=False)
    trained = trainer(tmp_path, callback, logging_steps=2)
    trained.train()
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 5]
    steps, losses = run.scalar("loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(losses.reshape(3, 2).mean(1), list(logged(trained, "loss").values()), rtol=1e-6)
    assert run.scalar("grad_norm")[0].tolist() == [2, 4, 6]


class InTuple(torch.nn.Module):
    """A model of one's own that returns loss and logits in a tuple, of which the Trainer takes the first."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.model, self.has_loss = tiny.llama(), has_loss

    def forward(self, **batch: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**batch)
        return (found.loss, found.logits) if self.has_loss else (found.logits[:1, :1, :1], found.loss)


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_tuple_begins_with_the_loss_or_with_something_else(has_loss: bool, tmp_path: Path) -> None:
    """One number of logits is no loss. What the Trainer optimizes then is its own affair."""
    model, losses = InTuple(has_loss), Losses()
    model.register_forward_hook(losses, with_kwargs=True)
    first, second = model(**torch.utils.data.default_collate(tiny.texts(2)))
    assert losses.take(1) == ({"loss": first} if has_loss else {})
    assert second.requires_grad


def test_a_loss_that_the_model_does_not_return_comes_with_the_logs(tmp_path: Path) -> None:
    """Label smoothing takes the labels away from the model."""
    callback = AttnwatchCallback(run=tmp_path / "run", every=4, report=False)
    trained = trainer(tmp_path, callback, logging_steps=2, label_smoothing_factor=0.1)
    trained.train()
    steps, losses = open_run(tmp_path / "run").scalar("loss")
    assert dict(zip(steps.tolist(), losses.tolist(), strict=True)) == logged(trained, "loss")
    assert steps.tolist() == [2, 4, 6]


def test_a_step_whose_logging_was_called_off_is_told_all_the_same(tmp_path: Path) -> None:
    class Mutes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_log = False

    callback = AttnwatchCallback(run=tmp_path / "run", every=2, report=False)
    trainer(tmp_path, callback, Mutes(), logging_steps=1).train()
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 3, 5]
    assert run.scalar("loss")[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_training_is_bit_for_bit_what_it_was(tmp_path: Path) -> None:
    callback = AttnwatchCallback(run=tmp_path / "run", every=2, report=False)
    watched, plain = trainer(tmp_path, callback, logging_steps=1), trainer(tmp_path, logging_steps=1)
    watched.train()
    plain.train()
    assert tiny.same(tiny.weights(watched.model), tiny.weights(plain.model))
    assert logged(watched, "loss") == logged(plain, "loss")
    assert logged(watched, "grad_norm") == logged(plain, "grad_norm")
    assert tiny.hooks(watched.model) == 0


def test_copies_of_the_model_tell_nothing() -> None:
    """An average of the weights that is kept beside the model, or one that was saved whole."""
    model, losses = tiny.llama(), Losses()
    model.register_forward_hook(losses, with_kwargs=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(**torch.utils.data.default_collate(tiny.texts(2)))
    assert losses.take(1) == {}
    loss = model(**torch.utils.data.default_collate(tiny.texts(2))).loss
    assert losses.take(1)["loss"].equal(loss)


def test_evaluation_in_between_leaves_no_trace(tmp_path: Path) -> None:
    """Also one before the first step, and one in the middle of a sampled step's logging."""
    alone = AttnwatchCallback(run=tmp_path / "alone", **tiny.ALL_ROWS)
    trainer(tmp_path, alone, max_steps=4).train()
    between = AttnwatchCallback(run=tmp_path / "between", **tiny.ALL_ROWS)
    evaluations = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    evaluating = trainer(tmp_path, between, max_steps=4, evaluated=tiny.texts(8, seed=5), **evaluations)
    evaluating.train()
    assert list(logged(evaluating, "eval_loss")) == [0, 1, 2, 3, 4]
    found, expected = open_run(tmp_path / "between"), open_run(tmp_path / "alone")
    tiny.assert_samples(found, expected)
    assert found.scalar("loss")[1].tolist() == expected.scalar("loss")[1].tolist()
    assert between.monitor is not None
    assert between.monitor.problems == []


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_that_the_scaler_skips_is_a_step(optim: str, tmp_path: Path) -> None:
    """Gradients overflow and the weights stay: the sample says so, and nothing is called a failure. fp16 itself needs
    an accelerator; here its scaler stands in the Trainer without it. A fused optimizer skips inside its own step."""
    callback = AttnwatchCallback(run=tmp_path / "run", spectrum_every=1, **tiny.ALL_ROWS)
    trained = trainer(tmp_path, callback, max_steps=4, max_grad_norm=0.0, optim=optim)
    trained.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    tiny.overflow(trained.model, at=1)
    trained.train()
    assert trained.accelerator.scaler.get_scale() == 2.0**15  # one step was skipped
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert run.problems == ()
    assert run.alerts == ()
    assert np.isfinite(run.scalar("loss")[1]).all()
    assert (run.metric("nonfinite") == 0).all()
    update = run.metric("update_ratio")
    assert (update > 0).all((1, 2)).tolist() == [True, False, True, True]
    assert np.isnan(update[1]).all()  # nothing changed


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restored", [False, True])
def test_a_resumed_run_goes_on_where_its_checkpoint_was(restored: bool, tmp_path: Path) -> None:
    """Steps are counted on, no alert is repeated or forgotten, whoever makes the callback anew: the script, or the
    Trainer from the checkpoint."""
    rules = tiny.rule_file(tmp_path / "rules.toml", 0.055, 0.025)  # they fire at steps 2 and 5
    options = {"run": tmp_path / "run", "rules": rules, "every": 2, "spectrum_every": 1, "report": False}
    trainer(tmp_path / "out", AttnwatchCallback(**options), save_strategy="steps", save_steps=3).train()
    again = trainer(tmp_path / "out", AttnwatchCallback(**options), restore_callback_states_from_checkpoint=restored)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    first, second = open_run(tmp_path / "run"), open_run(tmp_path / "run-2")
    assert first.steps.tolist() == [1, 3, 5]
    tiny.assert_samples(second, first, rtol=1e-5, atol=1e-7, first=4)
    assert second.scalar("loss")[0].tolist() == [4, 5, 6]
    assert [(alert.rule, alert.fired_step) for alert in first.alerts] == [("below_0", 2), ("below_1", 5)]
    assert [(alert.rule, alert.fired_step) for alert in second.alerts] == [("below_0", 2), ("below_1", 5)]


def test_options_that_a_checkpoint_cannot_hold_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only where the Trainer makes the callback from the checkpoint."""
    options = {"run": tmp_path / "run", "rules": [tiny.below(0.055)], "report": False}
    trainer(tmp_path / "out", AttnwatchCallback(**options), save_strategy="steps", save_steps=3, max_steps=3).train()
    again = trainer(tmp_path / "out", AttnwatchCallback(**options), restore_callback_states_from_checkpoint=True)
    with caplog.at_level(logging.WARNING, "attnwatch"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert "which cannot hold rules" in caplog.text
    assert "does not fit, and watching begins anew" in caplog.text  # these are the default rules now
    assert again.state.global_step == 6


def test_how_prometheus_was_asked_for_is_kept_in_a_checkpoint(tmp_path: Path) -> None:
    """Of the callback that the Trainer makes anew too: the same settings, not the default ones."""
    settings = Prometheus(port=None, textfile=tmp_path / "gpt.prom", labels={"job": "a"}, linger=0.0)
    options = {"run": tmp_path / "run", "prometheus": settings, "every": 1, "report": False}
    trainer(tmp_path / "out", AttnwatchCallback(**options), save_strategy="steps", save_steps=3, max_steps=3).train()
    again = trainer(tmp_path / "out", AttnwatchCallback(**options), restore_callback_states_from_checkpoint=True)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    (restored,) = (each for each in again.callback_handler.callbacks if isinstance(each, AttnwatchCallback))
    assert restored.lost == []
    assert restored._attached.options["prometheus"] == settings
    assert open_run(tmp_path / "run-2").steps.tolist() == [4, 5, 6]


def test_a_checkpoint_that_knew_no_callback_is_resumed_and_saved_again(tmp_path: Path) -> None:
    """Steps bear the Trainer's numbers all the same."""
    trainer(tmp_path / "out", save_strategy="steps", save_steps=3, max_steps=3).train()
    callback = AttnwatchCallback(run=tmp_path / "run", every=2, report=False)
    again = trainer(tmp_path / "out", callback, save_strategy="steps", save_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert open_run(tmp_path / "run").steps.tolist() == [4, 6]
    assert (tmp_path / "out" / "checkpoint-6").exists()


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_an_exception_loses_nothing(tmp_path: Path) -> None:
    """The Trainer tells nobody of it: the run ends when the next training begins, or with the callback."""
    callback = AttnwatchCallback(run=tmp_path / "run", every=1)
    data = Broken(tiny.texts(24))
    failing = trainer(tmp_path, callback, data=data, train_sampling_strategy="sequential")
    for _ in range(2):
        with pytest.raises(OSError, match="row 13 is gone"):
            failing.train()
    first = open_run(tmp_path / "run")
    assert first.ended
    assert first.steps.tolist() == [1, 2]
    assert first.scalar("loss")[0].tolist() == [1, 2]
    assert (tmp_path / "run" / "report.html").exists()
    assert not open_run(tmp_path / "run-2").ended
    del failing, callback
    gc.collect()
    assert open_run(tmp_path / "run-2").ended
    assert open_run(tmp_path / "run-2").steps.tolist() == [1, 2]


def test_closing_takes_everything_off_the_model(tmp_path: Path) -> None:
    callback = AttnwatchCallback(run=tmp_path / "run", every=1, report=False)
    failing = trainer(tmp_path, callback, data=Broken(tiny.texts(24)), train_sampling_strategy="sequential")
    with pytest.raises(OSError, match="row 13"):
        failing.train()
    assert tiny.hooks(failing.model) > 0
    callback.close()
    callback.close()
    assert tiny.hooks(failing.model) == 0
    assert open_run(tmp_path / "run").ended


@pytest.mark.parametrize("logging_steps", [1, 500])
def test_a_critical_alert_stops_training(logging_steps: int, tmp_path: Path) -> None:
    """At the step at which it fires; a warning does not."""
    rules = [tiny.below(0.055, "warning"), tiny.below(0.035)]
    callback = AttnwatchCallback(on_critical="stop", run=tmp_path / "run", rules=rules, report=False)
    trained = trainer(tmp_path, callback, logging_steps=logging_steps)
    trained.train()
    assert trained.state.global_step == 4
    run = open_run(tmp_path / "run")
    assert run.ended
    assert [(alert.severity, alert.fired_step) for alert in run.alerts] == [("warning", 2), ("critical", 4)]


def test_a_critical_alert_saves_a_checkpoint(tmp_path: Path) -> None:
    """Once, at the step at which it fires; training goes on."""
    options: dict[str, Any] = {"run": tmp_path / "run", "rules": [tiny.below(0.035)], "report": False}
    trained = trainer(tmp_path / "out", AttnwatchCallback(on_critical="save", **options))
    trained.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-4"]
    assert trained.state.global_step == 6


def test_a_critical_alert_may_be_left_to_the_reader(tmp_path: Path) -> None:
    callback = AttnwatchCallback(run=tmp_path / "run", rules=[tiny.below(0.035)], report=False)
    trained = trainer(tmp_path / "out", callback)
    trained.train()
    assert trained.state.global_step == 6
    assert list((tmp_path / "out").glob("checkpoint-*")) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_critical": "halt"}, "expected on_critical to be one of none, save, stop, found 'halt'"),
        ({"stop_on": "critical"}, "found stop_on; a trainer stops by its own control: say on_critical="),
        ({"optimizer": None}, "found optimizer; leave it out: the trainer's own steps are counted"),
        ({"evry": 5}, r"found evry; there are \(closest first\): every, "),
        ({"model": None}, r"found model; there are \(closest first\): "),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        AttnwatchCallback(**options)
    assert "\n" not in str(error.value)
