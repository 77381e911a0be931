"""When single numbers crossed their lines, asked of the rule engine sample by sample: slow, and independent."""

from __future__ import annotations

import math

import numpy as np

from attnwatch.monitor.leads import fired
from attnwatch.monitor.predictors import Crossing, predictors
from attnwatch.monitor.replay import drive
from attnwatch.monitor.rules import Engine
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Sample


def first_crossings(run: Run) -> list[Crossing]:
    """Of every predictor, the first to cross first; those that did not cross come last."""
    asked = {rule.name: rule.conditions(None)["when"].names[0] for rule in predictors()}
    metrics = [metric for metric in run.metrics if metric.name in asked.values()]
    known = {metric.name for metric in metrics} | set(run.scalar_names)
    engine = Engine([rule for rule in predictors() if asked[rule.name] in known], metrics)
    began = {name: float(run.scalar(name)[0][0]) for name in run.scalar_names}
    unseen = {metric.name for metric in metrics}

    def look(sample: Sample) -> None:
        for name in [name for name in unseen.intersection(sample.metrics) if np.isfinite(sample[name]).any()]:
            unseen.discard(name)
            began[name] = sample.step

    drive(run, [engine], look)
    first = {alert.rule: alert for alert in reversed(fired(engine.alerts))}
    found = []
    for rule in predictors():
        alert, start = first.get(rule.name), began.get(asked[rule.name])
        from_start = alert is not None and alert.pending_step == start
        step = None if alert is None else alert.fired_step
        found.append(Crossing(rule.name, step, rule.when, start is not None, from_start))
    return sorted(found, key=lambda crossing: math.inf if crossing.step is None else crossing.step)
