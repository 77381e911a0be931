"""The series in prometheus_client's default registry, served by the library itself."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.made_updates import HOSTILE, METRICS, full_update

from attnwatch.monitor.outputs.exposition import Exposition
from attnwatch.monitor.outputs.prometheus import Prometheus, prometheus_outputs
from attnwatch.monitor.sample import UsageError

SETTINGS = Prometheus(port=None, registry=True, per_head=True)


def ours(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], str]:
    """Value of each of our series, as text: NaN compares too."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): repr(float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("attnwatch_")
    }


def test_the_library_serves_what_our_own_port_would() -> None:
    """Every series with its value, hostile names included, beside the trainer's own; none after close."""
    own = prometheus_client.Gauge("trainer_own", "Of the trainer.")
    own.set(7)
    (output,), refused = prometheus_outputs(METRICS, SETTINGS)
    try:
        assert refused == []
        direct = Exposition(METRICS, 1024)
        for each in (output, direct):
            each.write(full_update(HOSTILE))
        served = prometheus_client.generate_latest().decode()
        assert ours(served) == ours("".join(direct.text()))
        assert "trainer_own 7.0" in served
    finally:
        output.close()
        output.close()
        prometheus_client.REGISTRY.unregister(own)
    assert ours(prometheus_client.generate_latest().decode()) == {}


def test_a_second_run_in_the_registry_is_refused_in_one_line() -> None:
    (output,), _ = prometheus_outputs(METRICS, SETTINGS)
    outputs, refused = prometheus_outputs(METRICS, SETTINGS)
    output.close()
    assert outputs == []
    assert refused == [
        "expected a prometheus_client registry without attnwatch's series, found those of another monitor; close it "
        "first, or give this one a port of its own"
    ]
    (again,), refused = prometheus_outputs(METRICS, SETTINGS)
    again.close()
    assert refused == []


def test_it_is_a_choice() -> None:
    with pytest.raises(UsageError, match=r"^prometheus: expected registry to be True or False, found 1$"):
        Prometheus(port=None, registry=1)  # type: ignore[arg-type]
