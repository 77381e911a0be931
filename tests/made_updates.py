"""Updates made up for the tests of what Prometheus scrapes, and one scrape of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from urllib.request import urlopen

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.outputs.prometheus import Prometheus, PrometheusOutput, prometheus_outputs
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, Update

Found = dict[str, dict[tuple[str, ...], float]]
"""Name -> values of its labels (in the order of the labels' names) -> value."""

METRICS = (
    Metric("entropy", "nat", "Mean entropy of the rows.", "mean"),
    Metric("logit_max", "1", "Largest logit.", "max"),
    Metric("qk_rank", "directions", "Effective rank of W_q^T W_k.", "last"),
)
EMPTY = Update(0, None, False, {}, (), (), (), (), 0, 0.0)
HOSTILE = (
    'h.0"} 1\n# TYPE x counter\nx 1',
    "back\\slash\\",
    "new\nline\r\ttab",
    "</script><script>alert(1)</script>",
    "{layer='x'}, # é 注意 \x00\x1b[2J",
    "",
)


def sample(step: int, values: Any, layers: tuple[str, ...] = ("h.0", "h.1")) -> Sample:
    """values: `[M, L, H]` of METRICS."""
    names = tuple(metric.name for metric in METRICS)
    return Sample(step, 1e9 + step, names, layers, np.array(values, dtype=np.float32))


def alert(rule: str, severity: str, state: str, place: str = "model") -> Alert:
    return Alert(rule, severity, state, place, 10, 12, None, 0.5, (("h.1", 0),), {"entropy": 0.1}, "s", "a")


def told(before: Update, taken: Sample) -> Update:
    return replace(before, step=taken.step, sample=taken, is_new=True, samples=before.samples + 1)


def full_update(layers: tuple[str, ...]) -> Update:
    """An update that fills every name there is, with one firing critical alert."""
    scalars = {"loss": math.nan, "grad_norm": math.inf, "lr": 1e-3, **dict.fromkeys(layers, 2.0)}
    return Update(
        step=100,
        sample=sample(80, np.arange(3 * len(layers) * 2).reshape(3, len(layers), 2), layers),
        is_new=True,
        scalars=scalars,
        alerts=(alert("collapse", "critical", "firing"), *(alert(x, "info", "pending", x) for x in layers)),
        changed=(),
        coverage=tuple(Coverage(layer, "verified") for layer in layers),
        problems=tuple(Problem(1, layer, layer) for layer in layers),
        samples=5,
        seconds=0.5,
        interval=20,
        share=0.01,
    )


def fetch(port: int, path: str = "/metrics") -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def parsed(text: str) -> Found:
    """As the Python library of Prometheus reads it."""
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            found.setdefault(name, {})[tuple(labels[key] for key in sorted(labels))] = value
    return found


def server(settings: Prometheus) -> PrometheusOutput:
    """The one output of such settings."""
    (output,), refused = prometheus_outputs(METRICS, settings)
    assert refused == []
    assert isinstance(output, PrometheusOutput)
    return output
