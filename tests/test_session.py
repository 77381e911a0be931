"""`watch` and `Monitor`: when samples are taken, what becomes of scalars, who is told, what ends a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.recipes import BATCH, LENGTH, TOKENS, Decoder
from torch import Tensor, nn

import attnwatch
from attnwatch import Alert, Rule, TrainingStopped, open_run
from attnwatch.monitor.rules import Engine
from attnwatch.monitor.sample import Update
from attnwatch.monitor.scalars import Pending

LAYERS = ("blocks.0.attention", "blocks.1.attention")
HIGH_LOSS = Rule("high_loss", "critical", "loss > 5", summary="too high")
ENTROPY = Rule("seen", "warning", "entropy_ratio > 0", share=1.0)


class Told:
    """An output that remembers."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.closed = 0

    def write(self, update: Update) -> None:
        self.updates.append(update)

    def close(self) -> None:
        self.closed += 1


def forward(model: nn.Module) -> Tensor:
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss


# --- when -------------------------------------------------------------------------------------------------------------


def test_every_row_reaches_the_probe(model: Decoder, run: Path) -> None:
    """The entropy of three rows, with `every_row` that of all of them."""
    found = []
    for options in ({"rows": None}, {"rows": 3}, {"rows": 3, "every_row": True}):
        place = run.with_name(f"run{len(found)}")
        with attnwatch.watch(model, run=place, every=1, report=False, **options) as monitor:
            torch.manual_seed(1)
            model(torch.randint(TOKENS, (BATCH, LENGTH))).sum().backward()
            monitor.step()
        found.append(attnwatch.open_run(place).metric("entropy"))
    whole, some, every = found
    np.testing.assert_allclose(every, whole, atol=1e-5)
    assert not np.allclose(some, whole, atol=1e-4)


def test_the_first_step_is_sampled_then_every_third(model: Decoder, run: Path) -> None:
    with attnwatch.watch(model, run=run, every=3, spectrum_every=2, report=False) as monitor:
        for _ in range(11):
            forward(model)
            monitor.step()
    stored = open_run(run)
    assert stored.steps.tolist() == [0, 3, 6, 9]
    assert stored.layers == LAYERS
    assert np.isfinite(stored.metric("entropy")).all()
    assert np.isfinite(stored.metric("qk_rank")).all((1, 2)).tolist() == [True, False, True, False]


def test_the_trainer_may_number_its_steps(model: Decoder, run: Path) -> None:
    """As after a resume; a number that is none is named, and counting goes on."""
    with attnwatch.watch(model, run=run, every=2, report=False) as monitor:
        for step in (100, np.int64(101), "last", 110):
            forward(model)
            monitor.step(step=step, loss=1.0)  # type: ignore[arg-type]
        assert "next sampled step 111" in str(monitor)
    assert [(p.step, p.where) for p in monitor.problems] == [(101, "step")]
    stored = open_run(run)
    assert stored.steps.tolist() == [100, 102]
    assert stored.scalar("loss")[0].tolist() == [100, 101, 102, 110]


def test_the_optimizer_can_count_the_steps(model: Decoder, run: Path) -> None:
    """A step that its loss scaler skips is none; several forwards before a step are one sample; scalars belong to the
    step before them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attnwatch.watch(model, run=run, every=2, optimizer=optimizer, report=False) as monitor:
        for skipped in (True, False, False, True, False):
            forward(model)
            forward(model)
            if not skipped:
                optimizer.step()
                monitor.step(loss=2.0, step=77)
    stored = open_run(run)
    assert stored.steps.tolist() == [0, 2]
    assert stored.scalar("loss")[0].tolist() == [0, 1, 2]
    assert monitor.problems == []


def test_scalars_before_the_first_step_of_the_optimizer_are_of_that_step(model: Decoder, run: Path) -> None:
    """`monitor.step` stands before `optimizer.step` in the loop, and is called once more than it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attnwatch.watch(model, run=run, every=1, optimizer=optimizer, report=False) as monitor:
        for loss in (3.0, 2.0, 1.0):
            forward(model)
            monitor.step(loss=loss)
            optimizer.step()
    stored = open_run(run)
    assert stored.steps.tolist() == [0, 1, 2]
    lines = [json.loads(line) for line in (run / "scalars.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 3.0), (0, 2.0), (1, 1.0)]


def test_what_is_known_can_be_read_while_training_goes_on(model: Decoder, run: Path) -> None:
    monitor = attnwatch.watch(model, run=run, every=2, rules=[ENTROPY], report=False)
    assert (monitor.last, monitor.coverage, monitor.alerts, monitor.metrics_port) == (None, [], [], None)
    assert str(monitor).splitlines() == [
        "attnwatch: no sample yet", f"  step 0, next sampled step 0, recorded in {run}", "  alert: none firing",
    ]  # fmt: skip
    forward(model)
    monitor.step()
    assert monitor.last is not None
    assert (monitor.last.step, monitor.last["entropy"].shape) == (0, (2, 4))
    assert [(c.name, c.state, c.heads, c.head_dim, c.dtype) for c in monitor.coverage] == [
        (name, "verified", 4, 8, "float32") for name in LAYERS
    ]
    assert [(a.rule, a.state, a.fired_step) for a in monitor.alerts] == [("seen", "firing", 0)]
    monitor.close()
    assert str(monitor).splitlines() == [
        "attnwatch: 2 of 2 attention layers verified", f"  step 0, closed, recorded in {run}",
        "  alert: warning seen at model since step 0",
    ]  # fmt: skip


# --- scalars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (1.5, 1.5), (2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (torch.tensor(3.0), 3.0), (math.inf, math.inf),
        (torch.tensor([4.0], requires_grad=True), 4.0), (torch.tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
        (math.nan, math.nan),
    ],
)  # fmt: skip
def test_scalars_of_any_number_type(given: Any, kept: float, model: Decoder, run: Path) -> None:
    with attnwatch.watch(model, run=run, report=False) as monitor:
        monitor.step(loss=given)
        monitor.step(loss=given)
    steps, values = open_run(run).scalar("loss")
    assert (steps.tolist(), values.tolist()) == ([0, 1], pytest.approx([kept, kept], abs=0, nan_ok=True))
    assert [p.where for p in monitor.problems] == ["model"]  # that no forward ran


@pytest.mark.parametrize(
    "given", [None, "high", [1.0], torch.ones(3), torch.ones(0), np.ones(2), 1j, torch.tensor(1j), {"loss": 1.0}]
)
def test_a_scalar_that_is_none_is_named_once_and_missing(given: Any, model: Decoder, run: Path) -> None:
    """The other scalars of the step are kept."""
    with attnwatch.watch(model, run=run, report=False) as monitor:
        for _ in range(2):
            forward(model)
            monitor.step(loss=given, lr=0.5)
    stored = open_run(run)
    assert [problem.where for problem in stored.problems] == ["loss"]
    assert np.isnan(stored.scalar("loss")[1]).all()
    assert stored.scalar("lr")[1].tolist() == [0.5, 0.5]


class Later:
    """A number on a device, and how often it was waited for."""

    def __init__(self, value: float):
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


def test_scalars_of_a_device_wait_for_the_next_sample() -> None:
    """They come with its copy, in their order, and are not read one by one."""
    pending: Pending[Later] = Pending()
    held = [Later(1.0), Later(2.0)]
    pending.add(0, {"loss": held[0], "lr": 0.5})
    pending.add(1, {"loss": 7.0})
    pending.add(2, {"loss": held[1]})
    assert pending.later() == held
    pending.settle([10.0, 20.0])
    assert pending.later() == []
    assert list(pending.take(before=2)) == [(0, {"loss": 10.0, "lr": 0.5}), (1, {"loss": 7.0})]
    assert list(pending.take()) == [(2, {"loss": 20.0})]
    assert [x.reads for x in held] == [0, 0]


def test_at_the_end_scalars_of_a_device_are_waited_for() -> None:
    pending: Pending[Later] = Pending()
    pending.add(4, {"loss": Later(3.0)})
    assert list(pending.take()) == [(4, {"loss": 3.0})]


class OnDevice(torch.Tensor):
    """A tensor that says that it is an accelerator's."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def test_device_scalars_are_recorded_with_the_next_sample_and_at_the_end(model: Decoder, run: Path) -> None:
    """Also when the trainer overwrites its tensor meanwhile."""
    with attnwatch.watch(model, run=run, every=3, report=False) as monitor:
        loss = torch.zeros(()).as_subclass(OnDevice)
        recorded = []
        for step in range(5):
            forward(model)
            loss.fill_(step)
            monitor.step(loss=loss)
            stored = open_run(run)
            recorded.append(len(stored.scalar("loss")[0]) if stored.scalar_names else 0)
    assert recorded == [1, 1, 1, 4, 4]
    steps, values = open_run(run).scalar("loss")
    assert (steps.tolist(), values.tolist()) == ([0, 1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0, 4.0])


# --- alerts -----------------------------------------------------------------------------------------------------------


def in_order(run: Path, rules: Sequence[Rule]) -> Iterator[Alert]:
    """The alerts of a stored run: steps in order, of each step the sample before the scalars."""
    stored = open_run(run)
    engine = Engine(rules, stored.metrics)
    samples = {sample.step: sample for sample in stored.iter_samples()}
    scalars: dict[int, dict[str, float]] = {}
    for name in stored.scalar_names:
        for step, value in zip(*stored.scalar(name), strict=True):
            scalars.setdefault(int(step), {})[name] = float(value)
    for step in sorted({*samples, *scalars}):
        if step in samples:
            engine.on_sample(samples[step], stored.coverage, {})
        if step in scalars:
            engine.on_scalars(step, scalars[step])
    yield from engine.alerts


@pytest.mark.parametrize("hook", [False, True])
def test_alerts_of_a_live_run_are_those_of_its_record(hook: bool, model: Decoder, run: Path) -> None:
    """Rules that mix a sample's numbers with scalars see the same ones: the loss of a step comes after its sample."""
    rules = [
        ENTROPY,
        Rule("odd", "info", "entropy_ratio > 0 and loss > 4.5", share=0.0, hold=1, keep=1),
        Rule("mixed", "info", "logit_max * scalar.noise > 0.05", scope="head", share=0.0, keep=1),
        Rule("only_scalars", "critical", "loss > mean(loss, 3)", hold=2, keep=1),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    with attnwatch.watch(
        model, run=run, every=2, rules=rules, optimizer=optimizer if hook else None, report=False
    ) as monitor:
        for step in range(16):
            loss: Tensor = forward(model) + step % 5
            optimizer.step()
            monitor.step(loss=loss.detach().as_subclass(OnDevice), noise=torch.rand((), generator=generator))
    kept = open_run(run).alerts
    live = [alert for alert in monitor.alerts if alert.fired_step is not None]
    assert {alert.rule for alert in live} == {rule.name for rule in rules}
    assert any(alert.state == "resolved" for alert in live)
    assert [repr(a) for a in in_order(run, rules) if a.fired_step is not None] == [repr(a) for a in live]
    assert sorted(map(repr, kept)) == sorted(map(repr, live))


def test_training_is_stopped_from_step_alone_and_once_an_alert(model: Decoder, run: Path) -> None:
    with attnwatch.watch(model, run=run, rules=[HIGH_LOSS], stop_on="critical", report=False) as monitor:
        forward(model)
        monitor.step(loss=4.0)
        with pytest.raises(TrainingStopped, match=r"high_loss \(critical\) at model, step 1: too high") as stopped:
            monitor.step(loss=6.0)
        monitor.step(loss=6.0)  # the trainer decided to go on
    assert (stopped.value.alert.rule, stopped.value.alert.fired_step) == ("high_loss", 1)
    assert open_run(run).scalar("loss")[1].tolist() == [4.0, 6.0, 6.0]


def test_the_optimizer_never_raises(model: Decoder, run: Path) -> None:
    """An alert that fires in the optimizer's hook stops at the next `monitor.step`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attnwatch.watch(
        model, run=run, every=1, rules=[ENTROPY], optimizer=optimizer, stop_on="warning", report=False
    ) as monitor:
        forward(model)
        optimizer.step()
        with pytest.raises(TrainingStopped):
            monitor.step()


def test_a_milder_alert_does_not_stop(model: Decoder, run: Path) -> None:
    with attnwatch.watch(model, run=run, rules=[ENTROPY], stop_on="critical", report=False) as monitor:
        forward(model)
        monitor.step()
    assert [(a.severity, a.state) for a in monitor.alerts] == [("warning", "firing")]
    assert open_run(run).ended


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_are_told_of_every_step_and_of_new_samples(model: Decoder, run: Path) -> None:
    told = Told()
    with attnwatch.watch(model, run=run, every=2, outputs=[told], report=False) as monitor:
        for step in range(3):
            forward(model)
            monitor.step(loss=float(step))
    heard = [(u.step, u.is_new, u.sample.step if u.sample else None, u.scalars.get("loss")) for u in told.updates]
    assert heard[:-1] == [
        (0, True, 0, None),
        (0, False, 0, 0.0),
        (1, False, 0, 1.0),
        (2, True, 2, 1.0),
        (2, False, 2, 2.0),
    ]
    assert told.closed == 1


def test_a_step_in_which_nothing_was_seen_is_no_sample_before_the_first_and_missing_after(
    model: Decoder, run: Path
) -> None:
    told = Told()
    with attnwatch.watch(model, run=run, every=1, outputs=[told], report=False) as monitor:
        monitor.step()
        assert monitor.last is None
        forward(model)
        monitor.step()
        monitor.step()
    stored = open_run(run)
    assert [update.is_new for update in told.updates] == [False, True, True, False]
    assert stored.steps.tolist() == [1, 2]
    assert np.isnan(stored.metric("entropy")).all((1, 2)).tolist() == [False, True]
    assert [p.where for p in monitor.problems] == ["model"]


def test_an_output_that_raises_is_switched_off_and_named_once(
    model: Decoder, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Told):
        def write(self, update: Update) -> None:
            super().write(update)
            raise ConnectionError("no route\nto host")

    broken, told = Broken(), Told()
    with attnwatch.watch(model, run=run, every=1, outputs=[broken, told], report=False) as monitor:
        for _ in range(3):
            forward(model)
            monitor.step(loss=1.0)
    assert (len(broken.updates), broken.closed) == (1, 1)
    assert len(told.updates) == 7
    assert [(p.where, p.text) for p in monitor.problems] == [("Broken", "ConnectionError: no route to host")]
    assert list(open_run(run).problems) == monitor.problems
    (logged,) = [record.getMessage() for record in caplog.records if "Broken" in record.getMessage()]
    assert logged.startswith("attnwatch: Broken: ConnectionError: no route to host (step ")


def test_an_output_that_cannot_close_is_named(model: Decoder, run: Path) -> None:
    class Stuck(Told):
        def close(self) -> None:
            raise RuntimeError("stuck")

    told = Told()
    attnwatch.watch(model, run=run, outputs=[Stuck(), told], report=False).close()
    assert told.closed == 1
