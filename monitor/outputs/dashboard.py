"""A Grafana dashboard of the exported series, as plain data: overview, alerts, layers over time, cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_RUN = 'instance=~"$instance"'
_WIDTH = 24  # columns of Grafana's grid
_STATES = {"0": ("resolved", "green"), "1": ("pending", "yellow"), "2": ("firing", "red")}


class Panel(NamedTuple):
    """kind: Grafana's panel type. queries: PromQL by legend. size: width and height on the grid. unit: Grafana's id."""

    kind: str
    title: str
    queries: Mapping[str, str]
    size: tuple[int, int]
    unit: str = "short"
    description: str = ""
    options: Mapping[str, Any] = {}
    mappings: Sequence[Mapping[str, Any]] = ()


def _by_text(texts: Mapping[str, tuple[str, str]]) -> list[Mapping[str, Any]]:
    """Numbers as coloured words."""
    results = {value: {"text": text, "color": color, "index": int(value)} for value, (text, color) in texts.items()}
    return [{"type": "value", "options": results}]


def _stat(title: str, query: str, legend: str = "__auto", **more: Any) -> Panel:
    options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
    return Panel("stat", title, {legend: query}, (4, 4), options=options, **more)


def _heat(title: str, query: str, description: str = "") -> Panel:
    options = {
        "calculate": False,  # each series is a row already
        "color": {"mode": "scheme", "scheme": "Viridis", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
        "yAxis": {"axisPlacement": "left"},
        "legend": {"show": True},
        "cellGap": 0,
    }
    return Panel("heatmap", title, {"{{layer}}": query}, (12, 10), description=description, options=options)


def _lines(title: str, queries: Mapping[str, str], width: int = 8, unit: str = "short") -> Panel:
    return Panel("timeseries", title, queries, (width, 8), unit)


ROWS: Mapping[str, Sequence[Panel]] = {
    "Overview": (
        _stat("Step", f"attnwatch_step{{{_OF_RUN}}}"),
        _stat("Loss", f"attnwatch_loss{{{_OF_RUN}}}"),
        _stat("Run", f"attnwatch_finished{{{_OF_RUN}}}",
              mappings=_by_text({"0": ("running", "green"), "1": ("finished", "blue")})),
        _stat("Alerts firing", f"sum by (severity) (attnwatch_alerts_firing{{{_OF_RUN}}})", "{{severity}}"),
        _stat("Layers", f"sum by (state) (attnwatch_layers{{{_OF_RUN}}})", "{{state}}"),
        _stat("Problems", f"sum(attnwatch_problems{{{_OF_RUN}}})"),
        _lines("Loss", {"{{instance}}": f"attnwatch_loss{{{_OF_RUN}}}"}),
        _lines("Learning rate and gradient norm", {
            "lr {{instance}}": f"attnwatch_lr{{{_OF_RUN}}}",
            "gradient norm {{instance}}": f"attnwatch_grad_norm{{{_OF_RUN}}}",
        }),
        _lines("Worst head of the model", {
            "least entropy ratio": f'min(attnwatch_entropy_ratio{{stat="min", {_OF_RUN}}})',
            "least rank ratio": f'min(attnwatch_qk_rank_ratio{{stat="min", {_OF_RUN}}})',
            "most saturated rows": f'max(attnwatch_saturated_rows{{stat="max", {_OF_RUN}}})',
        }),
    ),
    "Alerts": (
        Panel("state-timeline", "Alerts of the rules",
              {"{{rule}} at {{place}}": f"attnwatch_alert_state{{{_OF_RUN}}}"}, (16, 9),
              options={"mergeValues": True, "showValue": "never", "rowHeight": 0.8}, mappings=_by_text(_STATES)),
        Panel("timeseries", "Alerts firing by severity",
              {"{{severity}}": f"sum by (severity) (attnwatch_alerts_firing{{{_OF_RUN}}})"}, (8, 9)),
    ),
    "Layers": (
        _heat("Entropy ratio, least of the heads", f'attnwatch_entropy_ratio{{stat="min", {_OF_RUN}}}',
              "0 is one key a row, 1 is uniform attention."),
        _heat("Rank of W_q^T W_k over that of random weights, least of the heads",
              f'attnwatch_qk_rank_ratio{{stat="min", {_OF_RUN}}}'),
        _heat("Largest logit", f'attnwatch_logit_max{{stat="max", {_OF_RUN}}}'),
        _heat("$metric, $stat over the heads", f'attnwatch_${{metric}}{{stat="$stat", {_OF_RUN}}}',
              "Choose metric and stat at the top."),
    ),
    "Cost": (
        _lines("Share of time spent sampling", {
            "{{instance}}": f"rate(attnwatch_sampling_seconds_total{{{_OF_RUN}}}[$__rate_interval])"
        }, unit="percentunit"),
        _lines("Steps from sample to sample", {
            "{{instance}}": f"attnwatch_sampling_interval_steps{{{_OF_RUN}}}"
        }),
        _lines("Duration of a scrape", {
            "{{instance}}": f"scrape_duration_seconds{{{_OF_RUN}}} and on (job, instance) attnwatch_info"
        }, unit="s"),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Grafana's JSON of it, version 10 or newer; it asks for the Prometheus data source when it is opened."""
    return {
        "uid": "attnwatch",
        "title": "attnwatch",
        "description": "The attention of a transformer while it trains.",
        "tags": ["attnwatch"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    def ask(name: str, query: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "type": "query", "datasource": _DATASOURCE, "query": query, "refresh": 2, **more}

    metrics = 'query_result(count by (__name__) ({__name__=~"attnwatch_.+", stat="min"}))'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        ask(
            "instance",
            "label_values(attnwatch_info, instance)",
            label="run",
            multi=True,
            includeAll=True,
            allValue=".+",
        ),
        ask("metric", metrics, regex='/__name__="attnwatch_([^"]+)"/', sort=1),
        {
            "name": "stat",
            "type": "custom",
            "query": "min,mean,max",
            "current": {"text": "mean", "value": "mean"},
            "options": [{"text": x, "value": x, "selected": x == "mean"} for x in ("min", "mean", "max")],
        },
    ]


def _panels() -> Iterator[dict[str, Any]]:
    """Left to right, a new line where the grid is full."""
    number = y = 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, y, _WIDTH, 1),
        }
        y, x, tallest = y + 1, 0, 0
        for panel in panels:
            width, height = panel.size
            if x + width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            yield {"id": number, "gridPos": _place(x, y, width, height), **_panel(panel)}
            x, tallest = x + width, max(tallest, height)
        y += tallest


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": expr, "legendFormat": legend, "range": True}
        for i, (legend, expr) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "mappings": list(panel.mappings)}, "overrides": []},
        "options": dict(panel.options),
    }
