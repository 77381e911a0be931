"""What every tracker is told: numbers of a new sample, alerts that fired or resolved, at the end the report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.outputs.layers import per_layer
from attnwatch.monitor.outputs.log import alert_line, one_line
from attnwatch.monitor.outputs.notices import news
from attnwatch.monitor.sample import Update

METRICS = ("entropy_ratio", "spread_ratio", "logit_max", "map_rank", "first_key_mass", "qk_rank_ratio")
"""What the default rules ask for. Of each layer the least, mean and largest over its heads: 18 curves a layer."""


class Tracker(ABC):
    """An output for `watch(outputs=[...])`. metrics: which to show, by name.

    Values are named `attnwatch_METRIC/LAYER/STAT`, so that trackers, which group by what stands before the first "/",
    show a group for each metric; `attnwatch/alerts_firing` counts alerts. What was not measured is left out.
    """

    def __init__(self, metrics: Sequence[str] = METRICS) -> None:
        self._metrics = tuple(metrics)
        self._directory: Path | None = None

    def write(self, update: Update) -> str | None:
        self._directory = update.run
        if update.is_new and update.sample is not None:
            values = {one_line(f"attnwatch_{name}"): x for name, x in per_layer(update.sample, self._metrics).items()}
            values["attnwatch/alerts_firing"] = sum(alert.state == "firing" for alert in update.alerts)
            self.log(values, update.sample.step)
        for alert in news(update):
            self.alert(alert)
        return None

    def close(self) -> None:
        """Hands the report over, if there is one, and leaves the user's own tracker run open. A trainer may fit again,
        and write on then: to what is open by then, unless a run was given."""
        page = self._directory and self._directory / "report.html"
        if page and page.exists():
            self.report(page)

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def alert(self, alert: Alert) -> None: ...

    @abstractmethod
    def report(self, page: Path) -> None: ...


def title(alert: Alert) -> str:
    """A few words; what follows them in a tracker is `alert_line`."""
    return one_line(f"{alert.rule} {'resolved' if alert.state == 'resolved' else alert.severity} at {alert.place}")


def text(alert: Alert) -> str:
    return one_line(alert_line(alert))
