"""Rules over a stored run, as they would have been asked live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Engine, Rule
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import UsageError


def replay(run: Run, rules: Sequence[Rule], thin: int = 1) -> tuple[Alert, ...]:
    """Every alert, oldest first. thin: only every so many samples are taken, the first one first."""
    engine = Engine(_known(rules, run), run.metrics)
    scalars: dict[int, dict[str, float]] = {}
    for name in run.scalar_names:
        for step, value in zip(*run.scalar(name), strict=True):
            scalars.setdefault(int(step), {})[name] = float(value)
    samples = {sample.step: sample for number, sample in enumerate(run.iter_samples()) if number % thin == 0}
    last: dict[str, float] = {}
    for step in sorted(scalars.keys() | samples.keys()):
        if step in samples:
            engine.on_sample(samples[step], run.coverage, last)
        if step in scalars:
            last |= scalars[step]
            engine.on_scalars(step, scalars[step])
    return engine.alerts


def _known(rules: Sequence[Rule], run: Run) -> list[Rule]:
    """Those that a run can answer: an older one may lack a metric that a newer rule names."""
    known = []
    for rule in rules:
        try:
            Engine([rule], run.metrics)
        except UsageError:
            continue
        known.append(rule)
    return known


def divergence(rules: Sequence[Rule], rise: float) -> list[Rule]:
    """The same rules with another rise of the loss taken for divergence: 0.3 nat is meant for text."""
    old = "+ 0.3"
    return [replace(r, when=r.when.replace(old, f"+ {rise}")) if r.name == "loss_divergence" else r for r in rules]
