"""Small runs for the tests of the run directory, whose every number is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from attnwatch.monitor.sample import Metric, Sample, UsageError
from attnwatch.monitor.store import RunWriter

METRICS = (Metric("entropy", "nat", "mean entropy", "mean"), Metric("logit_max", "1", "largest logit", "max"))
HEADER = {"attnwatch": "0.1.0", "metrics": [vars(metric) for metric in METRICS], "rules": [{"name": "collapse"}]}


def sample(step: int, layers: tuple[str, ...] = ("a",), heads: int = 1, base: float = 0.0) -> Sample:
    """Values count up from `base` in memory order: metric by metric, layer by layer, head by head."""
    values = np.arange(2 * len(layers) * heads, dtype=np.float32).reshape(2, len(layers), heads) + np.float32(base)
    return Sample(step, step + 0.5, ("entropy", "logit_max"), layers, values, 0.25)


def run_of_three(path: Path) -> Path:
    """A run of the steps 1, 2, 3: one layer, one head, entropy 10, 20, 30 (so a record is 28 + 8 bytes)."""
    with closing(RunWriter(path, HEADER)) as writer:
        for step in (1, 2, 3):
            writer.sample(sample(step, base=10 * step))
    return path


def segment(run: Path, number: int = 1) -> Path:
    return run / "samples" / f"rank00000-{number:06d}.awlog"


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """UsageError of one line that holds every part."""
    with pytest.raises(UsageError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("expected ")
    for part in parts:
        assert part in message
