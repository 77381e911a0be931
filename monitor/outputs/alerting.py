"""Alerting rules for a Prometheus server: one for each rule of attnwatch, and some for the job that is watched.

`hold` and `keep` of a rule are counted in samples by attnwatch itself; what is exported is the outcome, so Prometheus
adds no waiting of its own. It keeps an alert for a while when its series is gone: a lost scrape, a restart and the end
of a run resolve nothing at once. No expression compares a number that may be NaN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from string import Formatter
from typing import NamedTuple

from attnwatch.monitor.rules import Rule

KEEP = "5m"
"""Longer than a restart of a trainer takes to be scraped again, and than any usual scrape interval."""

_HEADER = """\
# Alerting rules for Prometheus 2.42 or newer, printed by `attnwatch rules --prometheus`. The second group is about the
# job: its windows fit steps of up to a few minutes. severity is info, warning or critical.
"""


class AlertingRule(NamedTuple):
    """One alert of Prometheus. wait: its `for`, keep: its `keep_firing_for`, "" for none. rule: whose it is."""

    alert: str
    expr: str
    wait: str
    keep: str
    severity: str
    annotations: dict[str, str]
    rule: str = ""


JOB = (
    AlertingRule(
        "AttnwatchGone",
        # Seen within the hour, not finished then, and gone: a clean end says that it is one.
        "last_over_time(attnwatch_finished[1h]) == 0 unless attnwatch_finished",
        "5m", "", "critical",
        {
            "summary": "{{ $labels.instance }} answers no more and did not say that its run was finished",
            "advice": "The trainer crashed, was killed or hangs. Its run directory holds everything up to then: "
            "attnwatch report RUN.",
        },
    ),
    AlertingRule(
        "AttnwatchTrainingStalled",
        "changes(attnwatch_step[15m]) == 0 and attnwatch_finished == 0",
        "15m", "", "warning",
        {
            "summary": "{{ $labels.instance }} has made no training step for at least 15 minutes",
            "advice": "A hang, a long evaluation, or steps longer than the window: then make it longer.",
        },
    ),
    AlertingRule(
        "AttnwatchSamplingStalled",
        "(changes(attnwatch_sampled_step[30m]) == 0 or (attnwatch_step unless attnwatch_sampled_step)) "
        "and changes(attnwatch_step[30m]) > 0 and attnwatch_finished == 0",
        "30m", "", "warning",
        {
            "summary": "{{ $labels.instance }} trains on, but its attention has not been sampled for half an hour",
            "advice": "Read the problems: attnwatch_problem, or the report. If `every` steps take longer than the "
            "window, make it longer.",
        },
    ),
    AlertingRule(
        "AttnwatchLossNotFinite",
        "attnwatch_loss_nonfinite == 1",
        "", KEEP, "critical",
        {
            "summary": "the loss of {{ $labels.instance }} is NaN or infinite",
            "advice": "Roll back to a checkpoint from before the first attention alert; use a lower learning rate.",
        },
    ),
    AlertingRule(
        "AttnwatchLayersUncovered",
        "attnwatch_layers{state='uncovered'} > 0",
        "", KEEP, "warning",
        {
            "summary": "nothing is known of {{ $value }} attention layers of {{ $labels.instance }}",
            "advice": "See the note of each layer in the coverage table of the report.",
        },
    ),
    AlertingRule(
        "AttnwatchProblems",
        "attnwatch_problems > 0",
        "", "", "warning",
        {
            "summary": "{{ $value }} parts of the watching of {{ $labels.instance }} do not work",
            "advice": "Training is not touched. attnwatch_problem says where, the log and the report say what.",
        },
    ),
)  # fmt: skip


def prometheus_rules(rules: Sequence[Rule]) -> str:
    """The YAML that `rule_files` of a Prometheus server takes."""
    groups = {"attnwatch_rules": [alerting_rule(rule) for rule in rules], "attnwatch_job": JOB}
    return "\n".join([f"{_HEADER}groups:", *(line for name, some in groups.items() for line in _group(name, some)), ""])


def alerting_rule(rule: Rule) -> AlertingRule:
    """Its value is the step at which the streak began, for the advice to name."""
    where = f"{{rule='{rule.name}'}}"
    return AlertingRule(
        "Attnwatch" + "".join(word[:1].upper() + word[1:] for word in re.split("[^A-Za-z0-9]+", rule.name)),
        f"attnwatch_alert_pending_step{where} and attnwatch_alert_state{where} == 2",
        "",
        KEEP,
        rule.severity,
        {
            "summary": '{{ $labels.rule }} at {{ $labels.place }} since step {{ printf "%.0f" $value }}',
            "condition": _literal(" ".join(rule.when.split())),
            "advice": _template(rule.advice),
        },
        rule.name,
    )


def _template(advice: str) -> str:
    """A rule's text as one of Go: what the alert's evidence would fill in is named instead."""
    fields = {"place": "{{ $labels.place }}", "pending_step": '{{ printf "%.0f" $value }}'}
    return "".join(
        _literal(text) + ("" if field is None else fields.get(field, field))
        for text, field, *_ in Formatter().parse(advice)
    )


def _literal(text: str) -> str:
    return text.replace("{", '{{ "{" }}')


def _group(name: str, rules: Iterable[AlertingRule]) -> list[str]:
    lines = [f"  - name: {name}", "    rules:"]
    for rule in rules:
        lines += [f"      - alert: {rule.alert}", f"        expr: {_quoted(rule.expr)}"]
        lines += [f"        for: {rule.wait}"] if rule.wait else []
        lines += [f"        keep_firing_for: {rule.keep}"] if rule.keep else []
        lines += ["        labels:", f"          severity: {rule.severity}"]
        # `a-b` and `a_b` give one name: without this label they would be one alert, written twice.
        lines += [f"          rule: {_quoted(rule.rule)}"] if rule.rule else []
        lines += ["        annotations:"]
        lines += [f"          {key}: {_quoted(text)}" for key, text in rule.annotations.items()]
    return lines if len(lines) > 2 else []


def _quoted(text: str) -> str:
    """JSON's strings are YAML's but for a few characters that YAML forbids, or takes for the end of a line."""
    escape = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
    return re.sub(escape, lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
