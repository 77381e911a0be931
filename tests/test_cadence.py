"""When samples are taken: a fixed interval, and one that a budget lengthens and shortens."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recipes import BATCH, LENGTH, TOKENS, Attention, Decoder, fused

import attnwatch
from attnwatch.monitor.cadence import Cadence, Change


def play(cadence: Cadence, steps: int, step: float, cost: float) -> tuple[list[int], list[Change]]:
    """Steps of `step` seconds, samples of `cost` on top: which steps were sampled, and what changed."""
    sampled, changes = [], []
    for number in range(cadence.count, cadence.count + steps):
        is_sampled = cadence.due
        duration = math.nan if number == 0 else step + cost * is_sampled
        change = cadence.finish(duration, cost if is_sampled else None)
        sampled += [number] if is_sampled else []
        changes += [] if change is None else [change]
    return sampled, changes


@pytest.mark.parametrize("every", [1, 3, 20])
def test_without_a_budget_every_nth_step_is_sampled(every: int) -> None:
    sampled, changes = play(Cadence(every), 100, 0.1, 5.0)
    assert sampled == list(range(0, 100, every))
    assert changes == []


def test_a_budget_lengthens_the_interval_to_what_it_allows() -> None:
    """Steps of 0.1 s, samples of 0.02 s: at 1 % a sample pays for 2 s, of which 1.98 s are 19.8 steps."""
    sampled, changes = play(Cadence(5, budget=0.01), 100, 0.1, 0.02)
    assert [change.interval for change in changes] == [20]
    assert changes[0].share == pytest.approx(0.02 / (0.02 + 20 * 0.1))
    assert sampled == [0, 5, 25, 45, 65, 85]  # the first sample, which finds the layers, is not counted


def test_it_is_shortened_again_when_samples_grow_cheap() -> None:
    cadence = Cadence(5, budget=0.01, cycle=2)
    play(cadence, 60, 0.1, 0.08)
    assert cadence.interval == 80  # 0.08 / 0.1 * 99 = 79.2
    sampled, changes = play(cadence, 400, 0.1, 0.001)
    assert changes[-1].interval == cadence.interval == 5
    assert sampled[-1] - sampled[-2] == 5


def test_what_a_sampled_step_lasts_longer_counts_too() -> None:
    """A compiled model: the step takes 0.1 s, the sampled one 0.3 s, though the sample itself says 0.05 s."""
    cadence = Cadence(4, budget=0.05)
    for _ in range(9):
        sampled = cadence.due
        cadence.finish(0.3 if sampled else 0.1, 0.05 if sampled else None)
    assert cadence.interval == 38  # 0.2 / 0.1 * 19


@pytest.mark.parametrize("long", [1, 2, 4, 6, 9])
def test_a_budget_holds_where_steps_vary_a_hundred_times(long: int) -> None:
    """Of ten steps so many last 0.1 s, the others 1 ms; samples cost 10 ms, so that 1 % is one in 0.99 s. Samples that
    fall on long steps only must not be taken for long samples."""
    cadence = Cadence(1, budget=0.01)
    training, samples, changes = 0.0, 0, 0
    for number in range(5000):
        step = 0.1 if number % 10 < long else 0.001
        samples += cadence.due
        training += step
        changes += cadence.finish(step + 0.01 * cadence.due, 0.01 if cadence.due else None) is not None
    assert 0.7 < samples * 0.99 / training <= 1.11
    assert changes < 10


def test_steps_that_become_a_hundred_times_shorter_do_not_make_samples_long() -> None:
    """What is known of the long steps is not compared with the short ones: 1 ms a sample and 99 steps of 1 ms."""
    cadence = Cadence(20, budget=0.01)
    play(cadence, 2000, 0.1, 0.001)
    assert cadence.interval == 20
    sampled, changes = play(cadence, 1000, 0.001, 0.001)
    assert max(change.interval for change in changes) == cadence.interval == 99
    assert sampled[-1] - sampled[-2] == 99


def test_a_beginning_is_not_taken_for_the_whole() -> None:
    """The interval is lengthened ten times at most at once, and what it becomes is looked at again: 1 ms are 990."""
    _, changes = play(Cadence(1, budget=0.01), 3000, 0.001, 0.01)
    assert [change.interval for change in changes] == [10, 100, 990]


def test_a_pause_is_not_a_step() -> None:
    """An evaluation of a minute between two steps changes nothing."""
    cadence = Cadence(5, budget=0.01)
    play(cadence, 50, 0.1, 0.02)
    cadence.finish(60.0, None)
    _, changes = play(cadence, 100, 0.1, 0.02)
    assert (changes, cadence.interval) == ([], 20)


def test_a_budget_holds_where_every_step_was_sampled() -> None:
    sampled, changes = play(Cadence(1, budget=0.1), 40, 0.1, 0.02)
    assert [change.interval for change in changes] == [2]  # 0.02 / 0.1 * 9 = 1.8
    assert sampled[:5] == [0, 1, 3, 5, 7]


def test_a_restart_goes_on_at_the_next_multiple() -> None:
    cadence = Cadence(20)
    cadence.resume(45)
    assert (cadence.due, cadence.until) == (False, 15)
    assert play(cadence, 60, 0.1, 0.01)[0] == [60, 80, 100]


def test_the_share_is_unknown_before_two_samples() -> None:
    cadence = Cadence(5, budget=0.01)
    assert math.isnan(cadence.share)
    cadence.finish(math.nan, 3.0)
    assert math.isnan(cadence.share)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(1, 50),
    st.floats(0.001, 0.5),
    st.lists(st.tuples(st.sampled_from([0.0, 1e-6, 0.01, 1.0, 1e5, math.nan]), st.floats(0, 10)), max_size=200),
)
def test_it_never_fails_and_never_falls_below_what_was_asked(
    every: int, budget: float, steps: list[tuple[float, float]]
) -> None:
    """Whatever clocks say: standing still, running back within a step, leaping."""
    cadence = Cadence(every, budget)
    for duration, cost in steps:
        cadence.finish(duration, cost if cadence.due else None)
        assert cadence.interval >= every
        assert cadence.until <= cadence.interval
        assert math.isnan(cadence.share) or cadence.share >= 0


def test_a_watched_run_keeps_its_budget_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No sample of a model as small as this one costs less than a thousandth of 30 of its steps."""
    torch.manual_seed(0)
    model = Decoder(partial(Attention, fused))
    with (
        caplog.at_level(logging.INFO, "attnwatch"),
        attnwatch.watch(model, run=tmp_path / "run", every=1, budget=0.001, report=False) as monitor,
    ):
        for _ in range(30):
            model(torch.randint(TOKENS, (BATCH, LENGTH))).sum().backward()
            monitor.step(loss=1.0)
    run = attnwatch.open_run(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 11]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    first, change = [event for event in events if event["event"] == "interval"]
    assert (first["step"], first["interval"], change["step"]) == (1, 10, 11)
    assert 30 < change["interval"] <= 100
    assert 0 < change["share"] < 1
    assert f"sampling every {change['interval']} steps now, at {change['share']:.1%} of the time" in caplog.text
    assert run.problems == ()
    assert run.header["options"]["budget"] == 0.001
    assert run.intervals == tuple((event["step"], event["interval"], event["share"]) for event in (first, change))
