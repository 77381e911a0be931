"""The newest update in Prometheus' text format: per metric and layer the statistics over the heads.

Everything is rendered from arrays when it is asked for: training pays nothing between scrapes, and a layer or an alert
that is gone leaves no stale series behind. Written by hand because of its size: prometheus_client needs 45 ms for the
7,800 series of 80 layers and 32 metrics, all of it under the GIL that the trainer waits for; this needs 5 ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import attnwatch
from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.outputs.layers import STATS, over_heads
from attnwatch.monitor.sample import SCALARS, Metric, Sample, Update, unproved


class Series(NamedTuple):
    """One exported name. type: "gauge" or "counter". labels: their names."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


SERIES = (
    Series("attnwatch_info", "gauge", ("version",), "Always 1; the version of attnwatch that answers."),
    Series("attnwatch_finished", "gauge", (), "0 while the run goes on, 1 once it was closed, until that was scraped."),
    Series("attnwatch_step", "gauge", (), "Newest training step."),
    Series("attnwatch_sampled_step", "gauge", (), "Training step of the newest sample of the attention layers."),
    Series("attnwatch_loss", "gauge", (), "Newest training loss, as the trainer passed it."),
    Series("attnwatch_grad_norm", "gauge", (), "Newest gradient norm, as the trainer passed it."),
    Series("attnwatch_lr", "gauge", (), "Newest learning rate, as the trainer passed it."),
    Series("attnwatch_scalar", "gauge", ("name",), "Newest value of any other scalar that the trainer passed."),
    Series(
        "attnwatch_loss_nonfinite",
        "gauge",
        (),
        "1 while the newest loss is NaN or infinite, else 0; in PromQL no comparison with NaN is true.",
    ),
    Series(
        "attnwatch_alerts_firing",
        "gauge",
        ("severity",),
        "Alerts that are firing now; 0 is exported too, so that an absent series means a dead exporter.",
    ),
    Series(
        "attnwatch_alert_state",
        "gauge",
        ("rule", "severity", "place"),
        "State of each alert this run has had: 0 resolved, 1 pending, 2 firing.",
    ),
    Series(
        "attnwatch_alert_pending_step",
        "gauge",
        ("rule", "severity", "place"),
        "First training step of the streak of samples that made the alert.",
    ),
    Series("attnwatch_layers", "gauge", ("state",), "Attention layers by state of coverage."),
    Series(
        "attnwatch_layer_coverage",
        "gauge",
        ("layer", "state"),
        "Always 1; the layer's state: verified, logits_only (no spectrum) or uncovered (nothing is known).",
    ),
    Series("attnwatch_problems", "gauge", (), "Problems of the watching itself so far; training goes on."),
    Series("attnwatch_problem", "gauge", ("where",), "Problems of the watching itself so far, by place."),
    Series("attnwatch_samples_total", "counter", (), "Samples of the attention layers taken by this run."),
    Series("attnwatch_sampling_seconds_total", "counter", (), "Time that taking those samples cost training."),
    Series(
        "attnwatch_sampling_interval_steps", "gauge", (), "Training steps from one sample to the next, as it is now."
    ),
    Series("attnwatch_sampling_share", "gauge", (), "Share of training time that sampling costs at that interval."),
    Series(
        "attnwatch_truncated_heads",
        "gauge",
        (),
        "Heads that have no series of their own because there are more than max_heads; only with per_head.",
    ),
)
"""Every name beside the metrics. A metric `m` is the gauge `attnwatch_m` with labels `layer` and `stat`."""

_ALERT_STATES = {"resolved": 0, "pending": 1, "firing": 2}

Row = tuple[tuple[str, ...], float]
"""Label values and value of one series."""


def metric_series(metric: Metric) -> Series:
    """The exported name of a metric: per layer the "min", "mean" and "max" over its heads, NaN left out."""
    return Series(f"attnwatch_{metric.name}", "gauge", ("layer", "stat"), metric.help)


def head_series(metric: Metric) -> Series:
    """The exported name of a metric of single heads."""
    return Series(f"attnwatch_head_{metric.name}", "gauge", ("layer", "head"), metric.help)


class Exposition:
    """The newest update as text; `write` swaps one reference, so that a scrape sees one whole update.

    max_heads: so many heads also get series of their own; None: no head does. labels: put on every series.
    """

    def __init__(
        self, metrics: Sequence[Metric], max_heads: int | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        self.finished = False
        self._metrics = tuple(metrics)
        self._held = frozenset(metric.name for metric in metrics if metric.merge == "last")
        self._max_heads = max_heads
        self._constant = labels or {}
        self._newest: tuple[Update, Sample | None] | None = None

    def write(self, update: Update) -> None:
        sample = update.sample
        if self._newest is not None and sample is not None:
            before, held = self._newest
            if sample is before.sample and update.coverage is before.coverage:
                sample = held
            elif held is not None:
                sample = _carry(sample, held, self._held, unproved(update.coverage))
        self._newest = update, sample

    def finish(self) -> None:
        """The run has ended, cleanly: from now on the text says so."""
        self.finished = True

    def text(self) -> Iterator[str]:
        """The text, a family at a time."""
        rows: dict[str, list[Row]] = {
            "attnwatch_info": [((attnwatch.__version__,), 1)],
            "attnwatch_finished": [((), self.finished)],
            "attnwatch_alerts_firing": [((severity,), 0) for severity in SEVERITIES],
        }
        update, sample = self._newest or (None, None)
        if update is not None:
            rows |= _run_rows(update)
        heads = None
        if sample is not None and self._max_heads is not None:
            heads = np.argwhere(~np.isnan(sample.values).all(axis=0))  # [n, 2], layer by layer
            rows["attnwatch_truncated_heads"] = [((), max(len(heads) - self._max_heads, 0))]
            heads = heads[: self._max_heads]
        for series in SERIES:
            known = rows.get(series.name, ())
            yield _family(series, [f"{self._labels(series.labels, x)} {_number(value)}" for x, value in known])
        if sample is not None:
            yield from self._layers(sample)
            if heads is not None:
                yield from self._heads(sample, heads)

    def _layers(self, sample: Sample) -> Iterator[str]:
        names = ("layer", "stat")
        labels = [self._labels(names, (layer, stat)) for layer in sample.layers for stat in STATS]
        for metric in self._metrics:
            if metric.name in sample.metrics:
                stats = over_heads(sample[metric.name])
                is_known = ~np.isnan(stats[STATS.index("min")])  # a mean may be NaN by itself
                yield _family(metric_series(metric), _lines(labels, stats.T.ravel(), is_known.repeat(len(STATS))))

    def _heads(self, sample: Sample, heads: NDArray[np.intp]) -> Iterator[str]:
        names = ("layer", "head")
        labels = [self._labels(names, (sample.layers[layer], str(head))) for layer, head in heads.tolist()]
        for metric in self._metrics:
            if metric.name in sample.metrics:
                values = sample[metric.name][heads[:, 0], heads[:, 1]]
                yield _family(head_series(metric), _lines(labels, values, ~np.isnan(values)))

    def _labels(self, names: Sequence[str], values: Sequence[str]) -> str:
        pairs = [*self._constant.items(), *zip(names, values, strict=True)]
        return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}" if pairs else ""


def _family(series: Series, lines: Iterable[str]) -> str:
    """Help, type and samples; nothing of what has no sample."""
    samples = "".join([f"{series.name}{line}\n" for line in lines])
    return f"# HELP {series.name} {series.help}\n# TYPE {series.name} {series.type}\n{samples}" if samples else ""


def _lines(labels: Sequence[str], values: NDArray[np.floating], is_known: NDArray[np.bool_]) -> list[str]:
    """Nine digits tell any two float32 numbers apart."""
    known = [labels[i] for i in np.flatnonzero(is_known).tolist()]
    numbers = values[is_known]
    write = "{:.9g}".format if np.isfinite(numbers).all() else _number
    return [f"{label} {write(number)}" for label, number in zip(known, numbers.tolist(), strict=True)]


def _number(value: float) -> str:
    value = float(value)
    return repr(value) if isfinite(value) else "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(label: str) -> str:
    """A lone surrogate in a layer's name has no UTF-8 form and would fail the whole scrape: it is written out."""
    label = label.encode("utf-8", "backslashreplace").decode()
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _run_rows(update: Update) -> dict[str, list[Row]]:
    """The rows of `SERIES` that an update fills."""
    scalars = update.scalars
    firing = Counter(alert.severity for alert in update.alerts if alert.state == "firing")
    states = Counter(layer.state for layer in update.coverage)
    problems = Counter(problem.where for problem in update.problems)
    # Oldest first: an alert that came back overwrites its resolved past.
    alerts = {(a.rule, a.severity, a.place): a for a in update.alerts}
    rows: dict[str, list[Row]] = {
        "attnwatch_step": [((), update.step)],
        "attnwatch_scalar": [((name,), value) for name, value in scalars.items() if name not in SCALARS],
        "attnwatch_alerts_firing": [((level,), firing[level]) for level in SEVERITIES],
        "attnwatch_alert_state": [(labels, _ALERT_STATES[alert.state]) for labels, alert in alerts.items()],
        "attnwatch_alert_pending_step": [(labels, alert.pending_step) for labels, alert in alerts.items()],
        "attnwatch_layers": [((state,), states[state]) for state in ("verified", "logits_only", "uncovered")],
        "attnwatch_layer_coverage": [((layer.name, layer.state), 1) for layer in update.coverage],
        "attnwatch_problems": [((), len(update.problems))],
        "attnwatch_problem": [((where,), count) for where, count in problems.items()],
        "attnwatch_samples_total": [((), update.samples)],
        "attnwatch_sampling_seconds_total": [((), update.seconds)],
    }
    rows |= {f"attnwatch_{name}": [((), scalars[name])] for name in SCALARS if name in scalars}
    if "loss" in scalars:
        rows["attnwatch_loss_nonfinite"] = [((), not isfinite(scalars["loss"]))]
    if update.interval:
        rows["attnwatch_sampling_interval_steps"] = [((), update.interval)]
    if isfinite(update.share):
        rows["attnwatch_sampling_share"] = [((), update.share)]
    if update.sample is not None:
        rows["attnwatch_sampled_step"] = [((), update.sample.step)]
    return rows


def _carry(sample: Sample, before: Sample, held: frozenset[str], unproved: frozenset[str]) -> Sample:
    """`sample` with the `held` metrics that it did not measure taken from `before`, if their heads are the same.

    Not those of `unproved` layers.
    """
    same = sample.metrics == before.metrics and sample.layers == before.layers
    if not same or sample.values.shape != before.values.shape:
        return sample
    is_held = np.array([name in held for name in sample.metrics])[:, None, None]
    holds = is_held & np.array([layer not in unproved for layer in sample.layers])[:, None]
    values: NDArray[np.float32] = np.where(holds & np.isnan(sample.values), before.values, sample.values)
    return Sample(sample.step, sample.time, sample.metrics, sample.layers, values, sample.seconds)
