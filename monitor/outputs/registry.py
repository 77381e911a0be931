"""The same series in prometheus_client's own registry, for a trainer that serves metrics already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from attnwatch.monitor import sample
from attnwatch.monitor.outputs.exposition import SERIES, Exposition


class RegistryOutput:
    """A collector in the default registry until `close`. Raises UsageError when another run of this process is there.

    A scrape of it takes longer than one of our own port: the library makes objects of every series.
    """

    def __init__(self, metrics: Sequence[sample.Metric], max_heads: int | None = None) -> None:
        self._exposition = Exposition(metrics, max_heads)
        self._closed = False
        try:
            REGISTRY.register(self)
        except ValueError:
            self._closed = True
            raise sample.UsageError(
                "expected a prometheus_client registry without attnwatch's series, found those of another monitor; "
                "close it first, or give this one a port of its own"
            ) from None

    def describe(self) -> Iterator[Metric]:
        """The names by which the registry tells collectors apart."""
        yield from (GaugeMetricFamily(series.name, series.help) for series in SERIES)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at a scrape."""
        for family in self._exposition.text():
            yield from text_string_to_metric_families(family)

    def write(self, update: sample.Update) -> None:
        """The next scrape sees this update."""
        self._exposition.write(update)

    def close(self) -> None:
        """Takes the series away. Safe to call twice."""
        if not self._closed:
            self._closed = True
            REGISTRY.unregister(self)

    discard = close
