"""Writes the generated tables of the pages beside it: `python docs/generate.py`. What is between them is by hand.

A page marks a table with `<!-- table: NAME -->` before and `<!-- end -->` after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.statistics import ATTENTION
from attnwatch.monitor.conditions import FUNCTIONS
from attnwatch.monitor.outputs.alerting import JOB
from attnwatch.monitor.outputs.exposition import SERIES, metric_series
from attnwatch.monitor.rules import LAYER_FACTS, SAMPLE_FACTS, Rule, load_rules
from attnwatch.monitor.sample import SCALARS, Metric

PAGES = tuple(Path(__file__).with_name(f"{name}.md") for name in ("metrics", "rules", "prometheus"))
_MARKED = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def metrics() -> str:
    activations = {statistic.name for statistic in ATTENTION}
    return _table(
        ("metric", "unit", "from", "merge", "what it is"),
        (
            (f"[`{m.name}`](#{m.name})", m.unit, "activations" if m.name in activations else "weights", m.merge, m.help)
            for m in METRICS
        ),
    )


def rules() -> str:
    def row(rule: Rule) -> Sequence[str]:
        when = f"`{' '.join(rule.when.split())}`" + (f", at once `{rule.at_once}`" if rule.at_once else "")
        unless = f"`{rule.unless}`" if rule.unless else ""
        return f"`{rule.name}`", rule.severity, when, unless, rule.scope, f"{rule.share:g}", f"{rule.hold}, {rule.keep}"

    head = ("rule", "severity", "when", "unless", "scope", "share", "hold, keep")
    return _table(head, map(row, load_rules()))


def advice() -> str:
    return "\n".join(f"- **{rule.name}**: {rule.advice}" for rule in load_rules())


def functions() -> str:
    return _table(("function", "gives"), ((f"`{call}`", text) for call, text in FUNCTIONS.items()))


def names() -> str:
    return _table(
        ("of", "names"),
        (
            ("a head", _codes(metric.name for metric in METRICS)),
            ("its layer", _codes(LAYER_FACTS)),
            ("the sample", _codes(SAMPLE_FACTS)),
            ("the step", f"{_codes(SCALARS)}, and `scalar.NAME` for any other scalar passed to `monitor.step`"),
        ),
    )


def series() -> str:
    of_heads = [metric_series(Metric(*metric)) for metric in METRICS]
    return _table(
        ("series", "type", "labels", "help"),
        ((f"`{s.name}`", s.type, _codes(s.labels), s.help) for s in (*SERIES, *of_heads)),
    )


def alerting() -> str:
    return _table(
        ("alert", "severity", "fires when", "for", "kept for"),
        ((f"`{rule.alert}`", rule.severity, f"`{rule.expr}`", rule.wait, rule.keep) for rule in JOB),
    )


TABLES: dict[str, Callable[[], str]] = {
    "metrics": metrics, "rules": rules, "advice": advice, "functions": functions, "names": names, "series": series,
    "alerting": alerting,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every marked table as the code has it now. Raises KeyError for a table that does not exist."""
    return _MARKED.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}\n{mark[3]}", page)


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
