"""attnwatch: watches the attention of a transformer while it trains.

Importing this package loads no torch; the names that need it load it when they are first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnwatch.hooks.attention import Attention as Attention
    from attnwatch.hooks.probe import observe as observe
    from attnwatch.hooks.spectrum import qk_statistics as qk_statistics
    from attnwatch.hooks.statistics import attention_statistics as attention_statistics
    from attnwatch.monitor.alerts import Alert as Alert
    from attnwatch.monitor.alerts import TrainingStopped as TrainingStopped
    from attnwatch.monitor.attach.armed import arm as arm
    from attnwatch.monitor.outputs.prometheus import Prometheus as Prometheus
    from attnwatch.monitor.rules import Rule as Rule
    from attnwatch.monitor.sample import Coverage as Coverage
    from attnwatch.monitor.sample import Sample as Sample
    from attnwatch.monitor.sample import UsageError as UsageError
    from attnwatch.monitor.session import Monitor as Monitor
    from attnwatch.monitor.store import Run as Run
    from attnwatch.monitor.store import open_run as open_run
    from attnwatch.monitor.watching import watch as watch

__version__ = "0.1.0"

_HOME = {
    "Alert": "monitor.alerts",
    "Attention": "hooks.attention",
    "Coverage": "monitor.sample",
    "Monitor": "monitor.session",
    "Prometheus": "monitor.outputs.prometheus",
    "Rule": "monitor.rules",
    "Run": "monitor.store",
    "Sample": "monitor.sample",
    "TrainingStopped": "monitor.alerts",
    "UsageError": "monitor.sample",
    "arm": "monitor.attach.armed",
    "attention_statistics": "hooks.statistics",
    "observe": "hooks.probe",
    "open_run": "monitor.store",
    "qk_statistics": "hooks.spectrum",
    "watch": "monitor.watching",
}

__all__ = [  # noqa: RUF022 (the order users meet them)
    "watch", "observe", "attention_statistics", "qk_statistics", "open_run", "arm",
    "Monitor", "Run", "Sample", "Alert", "Rule", "Coverage", "Attention", "Prometheus", "TrainingStopped", "UsageError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnwatch' has no attribute {name!r}")
    return getattr(import_module(f"attnwatch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
