"""What a Prometheus server scrapes: the newest update, per metric and layer the statistics over the heads.

A scrape is answered from arrays that are already there: training pays nothing between scrapes, and a layer or
an alert that is gone leaves no stale series behind.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from errno import EADDRINUSE
from math import isfinite
from socket import SHUT_RDWR
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

import attnwatch
from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.sample import SCALARS, Metric, Sample, Update, UsageError, unproved

LOG = logging.getLogger("attnwatch")


class Series(NamedTuple):
    """One exported name. type: "gauge" or "counter". labels: their names."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


SERIES = (
    Series("attnwatch_info", "gauge", ("version",), "Always 1; the version of attnwatch that answers."),
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
)
"""Every name beside the metrics. A metric `m` is the gauge `attnwatch_m` with labels `layer` and `stat`."""

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
_ALERT_STATES = {"resolved": 0, "pending": 1, "firing": 2}

Row = tuple[tuple[str, ...], float]
"""Label values and value of one series."""


def metric_series(metric: Metric) -> Series:
    """The exported name of a metric: per layer the "min", "mean" and "max" over its heads, NaN left out."""
    return Series(f"attnwatch_{metric.name}", "gauge", ("layer", "stat"), metric.help)


class PrometheusOutput:
    """Serves `http://host:port/metrics` from a thread until `close`.

    port: 0 lets the system pick one; the attribute `port` is the real one. Raises UsageError when there is none.
    """

    def __init__(self, metrics: Sequence[Metric], port: int, host: str = "127.0.0.1") -> None:
        self._collector = _Collector(metrics)
        registry = CollectorRegistry()
        registry.register(self._collector)
        self._server = _listen(host, port, _Handler.factory(registry))
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="attnwatch-prometheus", daemon=True)
        self._thread.start()

    def write(self, update: Update) -> None:
        """The next scrape sees this update."""
        self._collector.write(update)

    def close(self) -> None:
        """Frees the port; safe to call twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            # A forked data-loading worker holds a copy of this socket: closing ours alone leaves it listening.
            with suppress(OSError):  # macOS does not know how
                self._server.socket.shutdown(SHUT_RDWR)
        self._server.server_close()
        self._thread.join()


class _Collector:
    """The newest update as metric families; `write` swaps one reference, so a scrape sees one whole update."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = [(metric.name, metric_series(metric)) for metric in metrics]
        self._held = frozenset(metric.name for metric in metrics if metric.merge == "last")
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

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        newest = self._newest
        rows: dict[str, Iterable[Row]] = {
            "attnwatch_info": [((attnwatch.__version__,), 1)],
            "attnwatch_alerts_firing": [((severity,), 0) for severity in SEVERITIES],
        }
        if newest is not None:
            rows |= _run_rows(newest[0])
        for series in SERIES:
            yield from _family(series, rows.get(series.name, ()))
        if newest is not None and newest[1] is not None:
            for name, series in self._metrics:
                yield from _family(series, _head_rows(newest[1], name))


def _family(series: Series, rows: Iterable[Row]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    family = _FAMILIES[series.type](series.name, series.help, labels=series.labels)
    for labels, value in rows:
        # A lone surrogate in a layer's name has no UTF-8 form and would fail the whole scrape.
        family.add_metric([text.encode("utf-8", "backslashreplace").decode() for text in labels], value)
    if family.samples:
        yield family


def _run_rows(update: Update) -> dict[str, list[Row]]:
    """The rows of `SERIES` that an update fills."""
    scalars = update.scalars
    firing = Counter(alert.severity for alert in update.alerts if alert.state == "firing")
    states = Counter(layer.state for layer in update.coverage)
    problems = Counter(problem.where for problem in update.problems)
    # Oldest first: an alert that came back overwrites its resolved past.
    alerts = {(a.rule, a.severity, a.place): _ALERT_STATES[a.state] for a in update.alerts}
    rows: dict[str, list[Row]] = {
        "attnwatch_step": [((), update.step)],
        "attnwatch_scalar": [((name,), value) for name, value in scalars.items() if name not in SCALARS],
        "attnwatch_alerts_firing": [((level,), firing[level]) for level in SEVERITIES],
        "attnwatch_alert_state": list(alerts.items()),
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
    if update.sample is not None:
        rows["attnwatch_sampled_step"] = [((), update.sample.step)]
    return rows


def _head_rows(sample: Sample, metric: str) -> Iterator[Row]:
    """min, mean and max over the heads of every layer that has a value (infinite ones count)."""
    if metric not in sample.metrics:
        return
    values = sample[metric].astype(np.float64)
    seen = ~np.isnan(values)
    count = seen.sum(axis=1)
    lowest = values.min(axis=1, initial=np.inf, where=seen)
    highest = values.max(axis=1, initial=-np.inf, where=seen)
    with np.errstate(invalid="ignore"):  # +inf and -inf in one layer have no mean
        mean = values.sum(axis=1, where=seen) / np.maximum(count, 1)
    for i in np.flatnonzero(count):
        layer = sample.layers[i]
        yield (layer, "min"), lowest[i]
        yield (layer, "mean"), mean[i]
        yield (layer, "max"), highest[i]


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


class _Handler(MetricsHandler):
    """The library's handler, which would answer any path."""

    timeout = 30  # seconds; an idle or stuck client's thread ends

    def do_GET(self) -> None:  # noqa: N802 (the name http.server calls)
        if urlsplit(self.path).path == "/metrics":
            super().do_GET()
        else:
            self.send_error(404, explain="The metrics are at /metrics.")


class _Server(ThreadingTCPServer):
    """A thread per client, so that a slow one holds up nobody."""

    # Not HTTPServer: that one looks up the host's name at start, which takes seconds where DNS is broken.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # OSError: the client hung up
            LOG.error("attnwatch: a scrape failed", exc_info=error)


def _listen(host: str, port: int, handler: type[BaseRequestHandler]) -> _Server:
    advice = "pass prometheus=0 to let the system pick"
    if type(port) is not int or not 0 <= port <= 65535:
        raise UsageError(f"prometheus: expected a port from 0 to 65535, found {port!r}; {advice}")
    try:
        return _Server((host, port), handler)
    except OSError as error:
        reason = error.strerror or error
        if error.errno == EADDRINUSE:
            advice += "; an earlier monitor of this process may hold it until its monitor.close()"
        raise UsageError(f"prometheus: expected a free port, found {host}:{port} ({reason}); {advice}") from None
