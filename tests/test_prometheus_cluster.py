"""A real watched run beside real servers: its collapse reaches a webhook, and every panel of the dashboard has data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus as grafana_prometheus
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel
from tests import monitoring
from tests.recipes import BATCH, LENGTH, TOKENS, Attention, Decoder, fused

import attnwatch
from attnwatch.monitor.outputs.alerting import KEEP, prometheus_rules
from attnwatch.monitor.outputs.dashboard import dashboard

RULE = attnwatch.Rule(
    "sharp", "critical", "entropy_ratio < 0.2", share=0.5, hold=1, keep=1, advice="Go back before step {pending_step}."
)


class Run:
    """A small model that trains watched; its attention collapses and recovers when it is told to."""

    def __init__(self, path: Path, port: int) -> None:
        torch.manual_seed(0)
        self.model = Decoder(partial(Attention, fused))
        self.monitor = attnwatch.watch(
            self.model, run=path, every=1, spectrum_every=1, rules=[RULE], report=False,
            prometheus=attnwatch.Prometheus(port=port, linger=5),
        )  # fmt: skip
        assert self.monitor.metrics_port is not None
        self.port = self.monitor.metrics_port
        self.targets = {"static_configs": [{"targets": [f"127.0.0.1:{self.port}"]}]}

    def step(self) -> None:
        self.model(torch.randint(TOKENS, (BATCH, LENGTH))).square().mean().backward()
        self.model.zero_grad()
        self.monitor.step(loss=1.5, grad_norm=0.5, lr=1e-3)

    def sharpen(self, factor: float) -> None:
        with torch.no_grad():
            for block in self.model.blocks:
                block.attention.qkv.weight.mul_(factor)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run", monitoring.free_port())
    yield run
    run.monitor.close()


def test_a_collapse_and_its_end_reach_a_webhook(run: Run, tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """Through Prometheus with the rules that are shipped, and Alertmanager. Then the run starts again on its port."""
    rules = prometheus_rules([RULE])
    assert f"keep_firing_for: {KEEP}" in rules
    rules = rules.replace(f"keep_firing_for: {KEEP}", "keep_firing_for: 1s")
    with (
        monitoring.webhook() as (url, heard),
        monitoring.alertmanager(tmp_path / "alertmanager", url) as alertmanager,
        monitoring.prometheus(tmp_path / "prometheus", run.targets, rules, alertmanager) as prometheus,
    ):
        run.step()
        wait_for(lambda: prometheus.query("attnwatch_samples_total == 1"), "the healthy sample")
        run.sharpen(1000)
        run.step()
        firing = wait_for(lambda: heard and heard[0], "the collapse")
        assert firing["status"] == "firing"
        assert firing["labels"] == {
            "alertname": "AttnwatchSharp", "rule": "sharp", "place": "model", "severity": "critical",
            "job": "training", "instance": f"127.0.0.1:{run.port}",
        }  # fmt: skip
        assert firing["annotations"]["advice"] == "Go back before step 1."
        run.sharpen(1 / 1000)
        run.step()
        resolved = wait_for(lambda: [alert for alert in heard if alert["status"] == "resolved"], "the recovery")
        assert {alert["labels"]["alertname"] for alert in heard} == {"AttnwatchSharp"}
        assert resolved[0]["fingerprint"] == firing["fingerprint"]

        run.monitor.close()  # returns when the server has seen the end
        wait_for(lambda: prometheus.query("last_over_time(attnwatch_finished[1m]) == 1"), "the end")
        again = Run(tmp_path / "again", run.port)
        again.step()
        wait_for(lambda: prometheus.query("attnwatch_step == 0 and attnwatch_finished == 0"), "the restart")
        assert prometheus.query("attnwatch_alert_state") == {}
        wait_for(lambda: prometheus.alerts() == {}, "no alert of the run before")
        again.monitor.close()


def test_every_query_of_the_dashboard_has_data(run: Run, tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """In a run that collapsed, on a real server; and its variables find what they offer."""
    with monitoring.prometheus(tmp_path / "prometheus", run.targets) as prometheus:
        run.step()
        run.sharpen(1000)
        run.step()
        wait_for(lambda: prometheus.query("attnwatch_alert_state == 2"), "the collapse")
        run.step()
        variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
        chosen = {"$instance": ".+", "${metric}": "map_rank", "$stat": "max", "$__rate_interval": "30s"}
        queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
        assert len(queries) > 15
        for query in queries:
            for name, value in chosen.items():
                query = query.replace(name, value)
            assert "$" not in query
            wait_for(partial(prometheus.series, query), query)

        asked = re.fullmatch(r"query_result\((.*)\)", variables["metric"]["query"])
        assert asked is not None
        names = [labels["__name__"] for labels, _ in prometheus.series(asked[1])]
        offered = re.compile(variables["metric"]["regex"].strip("/"))
        found = {match[1] for name in names if (match := offered.search(f'{{__name__="{name}"}} 1'))}
        assert {"entropy_ratio", "qk_rank", "map_rank"} <= found
        assert found.isdisjoint({"step", "loss", "info", "alert_state"})
        run.monitor.close()


def test_grafana_takes_the_dashboard() -> None:
    """Its own typed models read it, panel by panel and query by query, and write out the same."""
    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    written = json.loads(JSONEncoder(sort_keys=True).encode(read))
    assert _kept(dashboard(), written) == dashboard()
    panels = [panel for panel in read.panels or () if isinstance(panel, Panel)]
    assert len(panels) + sum(isinstance(panel, RowPanel) for panel in read.panels or ()) == len(dashboard()["panels"])
    assert all(isinstance(target, grafana_prometheus.Dataquery) for panel in panels for target in panel.targets or ())


def test_no_panel_covers_another() -> None:
    """And none stands beyond the 24 columns of the grid."""
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert taken.isdisjoint(cells)
        assert max(x for x, _ in cells) < 24
        taken |= cells


def _kept(given: Any, written: Any) -> Any:
    """What of `given` is in `written`, which may hold defaults beside it."""
    if isinstance(given, dict) and isinstance(written, dict):
        return {key: _kept(value, written[key]) for key, value in given.items() if key in written}
    if isinstance(given, list) and isinstance(written, list):
        return [_kept(*pair) for pair in zip(given, written, strict=True)]
    return written
