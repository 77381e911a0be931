"""Rules over a stored run, all of it or with fewer samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.replay import drive
from attnwatch.monitor.rules import Engine, Rule
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Sample


class Thinned:
    """A run of which only every `thin`-th sample was taken, the first one first."""

    def __init__(self, run: Run, thin: int) -> None:
        self._run, self._thin = run, thin

    def iter_samples(self) -> Iterator[Sample]:
        return (sample for number, sample in enumerate(self._run.iter_samples()) if number % self._thin == 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def replay(run: Run, rules: Sequence[Rule], thin: int = 1) -> tuple[Alert, ...]:
    """Every alert, oldest first. thin: only every so many samples are taken."""
    engine = Engine(rules, run.metrics)
    drive(Thinned(run, thin), [engine])  # type: ignore[arg-type]
    return engine.alerts


def divergence(rules: Sequence[Rule], rise: float) -> list[Rule]:
    """The same rules with another rise of the loss taken for divergence: 0.3 nat is meant for text."""
    return [replace(r, when=r.when.replace("+ 0.3", f"+ {rise}")) if r.name == "loss_divergence" else r for r in rules]
