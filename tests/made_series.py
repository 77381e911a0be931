"""Runs made up for the tests of replays: lived through as a monitor does, and stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.made_samples import COLLAPSED, METRICS, covered, sample

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Engine, Rule, load_rules
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage, Metric, Sample
from attnwatch.monitor.store import RunWriter, open_run

Step = tuple[int, Sample | None, Mapping[str, float]]
"""One step of a series: its number, the sample taken at it, the scalars passed at it."""


def plain(alerts: Sequence[Alert]) -> list[dict[str, Any]]:
    """Those that fired, as run files have them (numbers that JSON cannot hold are None, tuples lists), in one order."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: known(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [known(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return sorted((known(asdict(each)) for each in alerts if each.fired_step is not None), key=str)


def store(
    path: Path, rules: Sequence[Rule], series: Sequence[Step], news: Mapping[int, Sequence[Coverage]] | None = None,
    metrics: Sequence[Metric] = METRICS,
) -> tuple[Run, tuple[Alert, ...]]:  # fmt: skip
    """Lives through a series as the monitor does: the run it leaves, the alerts at its end. news: coverage by step."""
    writer = RunWriter(path, {"metrics": [asdict(m) for m in metrics], "rules": [asdict(rule) for rule in rules]})
    engine, known = Engine(rules, metrics), list(covered())
    told: list[Alert] = []
    for step, taken, scalars in series:
        if taken is not None:
            if news is None or step in news:
                known = list(covered() if news is None else news[step])
                writer.event({"event": "coverage", "step": step, "layers": [asdict(layer) for layer in known]})
            if taken.layers:
                writer.sample(taken)
            else:
                writer.event({"event": "unmeasured", "step": step})
            told += engine.on_sample(taken, known, {})
        if scalars:
            writer.scalars(step, scalars)
            told += engine.on_scalars(step, scalars)
    for each in told:
        if each.fired_step is not None:
            writer.event({"event": "alert", "step": each.resolved_step or each.fired_step, **asdict(each)})
    writer.close()
    return open_run(path), engine.alerts


def falling(path: Path, diverges: bool = False, falls: bool = True, rules: Sequence[Rule] | None = None) -> Run:
    """400 steps sampled every 10th. Entropy falls from 1 by .0025 a step, so that it is below x from 400 (1 - x) on;
    the spread is that of a collapse after the first sample.

    If it diverges, the loss is 2 to step 299, then 5: its mean of 20 passes 2.3 with the third, at step 302.
    """
    low = COLLAPSED | {"logit_max": 9.0, "nonfinite": 0.0}
    series: list[Step] = []
    for step in range(400):
        heads = low | {"entropy_ratio": 1 - step / 400} | ({} if step else {"spread_ratio": 1.5}) if falls else {}
        taken = sample(step, layers=2, width=2, **heads) if step % 10 == 0 else None
        series.append((step, taken, {"loss": 5.0 if diverges and step >= 300 else 2.0, "grad_norm": 1 + step / 100}))
    return store(path, load_rules() if rules is None else rules, series)[0]
