"""The figures as a page of Markdown."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import date

import numpy as np
import torch
from benchmarks.detection import sampling
from benchmarks.detection.recipe import COLLAPSE, OTHER, SOUND, Recipe
from benchmarks.detection.score import (
    Case,
    Score,
    by_rule,
    by_severity,
    interval,
    score,
    share_interval,
)
from benchmarks.detection.study import HALVES, Known, cases, lines
from benchmarks.detection.truth import IMPAIRED

import attnwatch
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Rule
from attnwatch.monitor.run import Run

Wanted = Callable[[Alert], bool]
COLLAPSE_RULES = ("sparse_low_rank", "entropy_collapse")
OTHER_RULES = ("sinks_lost", "attention_uniform")
"""The rules for the failures of recipe.OTHER, in its order."""
SCORE_HEAD = ("", "found", "late", "lead: median", "quartiles", "least", "false alarms")


THINS = (1, 2, 4)


def pages(runs: Sequence[Known], sampled: Sequence[tuple[Recipe, list[Run]]], rules: Sequence[Rule]) -> tuple[str, str]:
    """The figures and the list of all runs. sampled: as `sampling.groups` gives them."""
    chosen = lines(runs)
    all_cases = cases(runs, [*rules, *chosen])
    parts = [
        "# Detection: what the rules find, how early, and how often they cry wolf",
        "Written by `python -m benchmarks.detection table` from the runs of `python -m benchmarks.detection run`, "
        f"{date.today()}, attnwatch {attnwatch.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, one thread a run.",
        INTRODUCTION,
        "## The runs",
        _runs(all_cases),
        "## The rules",
        RULES_TEXT,
        *(_section(half, all_cases, _wanted(rules)) for half in HALVES),
        _section("all", all_cases, _wanted(rules)),
        "### False alarms and misses",
        _mistakes(all_cases),
        "## Single numbers",
        LINES_TEXT,
        *(_section(half, all_cases, _line_wanted(chosen)) for half in HALVES),
        "## Which comes first, which cries wolf",
        _order(all_cases, chosen),
        "## Rates raised at once",
        JUMPS_TEXT,
        _jumps(all_cases),
        "## Sinks lost, attention uniform",
        _others(all_cases, rules),
        "## Fewer samples",
        _thinned(runs, rules),
        _sampled(sampled, rules),
    ]
    every = [
        "# Detection: every run",
        "The runs of [detection.md](detection.md), by the same command.",
        _every(all_cases),
    ]
    return "\n\n".join(parts) + "\n", "\n\n".join(every) + "\n"


INTRODUCTION = """\
The runs are small transformers trained for seconds on the source of Python's standard library and on
scikit-learn's digits. A run's label is not assumed: what became of it is read off its loss (and, for the kind of
failure, off its heads), and a run that did not become what it was meant to be counts as what it became. `diverges`:
the mean of 20 losses stays 0.3 nat (digits: 0.5) above its lowest for 40 steps, or the loss is no number, with a
quarter of the heads saturated. `collapses`: no divergence, but a final loss at least 0.1 nat worse than a healthy
recipe's on the same data, with a quarter of the heads saturated. `spikes`: divergence with sound heads. `healthy`:
within 0.1 nat of the reference (without a reference: of its own lowest). `impaired`: worse than that with sound
heads; counted nowhere.

A recipe's half is fixed by a hash of its name. The lines of the default rules were looked for on the *tuning* half and
judged on the *report* half. What was seen there led to one more condition, on the directions of a head's map, after a
false alarm on `copy_previous_2`; the recipes that are like it (`copy_previous_*`) and the long healthy ones
(`sane_*long*`) were made afterwards. [Every run](detection-runs.md) is listed by itself."""

RULES_TEXT = """\
*found*: runs whose attention collapsed with an alert, on divergent runs one that fired before the onset and still
stood there. *late*: divergent runs with an alert only at the onset or after. *lead*: steps from that alert to the
onset, on divergent runs. *false alarms*: runs with sound attention and such an alert. In brackets 95 % bootstrap
intervals (percentile, 1,000 resamples of the runs)."""

LINES_TEXT = """\
One metric and one line each: a quarter of the heads beyond it, three samples in a row. *shipped*: the line that
attnwatch compares by default (monitor/predictors.toml says where it comes from); *tuned*: the one that separates best
on the tuning half (rate of detection less rate of false alarm, then the longest median lead)."""


JUMPS_TEXT = """\
Runs whose rate was raised five times or more from one step to the next. Attention and loss fail together here, within
a few samples, and no rule can come first: they are left out of the leads above (sound ones do count among the false
alarms)."""


def _ramped(all_cases: Sequence[Case]) -> list[Case]:
    """Without the runs in which nothing could precede the loss."""
    return [case for case in all_cases if not (case.recipe.abrupt and case.truth.label in COLLAPSE)]


def _wanted(rules: Sequence[Rule]) -> dict[str, Wanted]:
    rows: dict[str, Wanted] = {
        "**either collapse rule**": by_rule(*COLLAPSE_RULES),
        "**any critical alert**": by_severity("critical"),
        "**any critical or warning**": by_severity("critical", "warning"),
    }
    apart = ("loss_divergence", "uncovered_layers")
    return rows | {f"`{rule.name}` ({rule.severity})": by_rule(rule.name) for rule in rules if rule.name not in apart}


def _line_wanted(chosen: Sequence[Rule]) -> dict[str, Wanted]:
    return {f"`{rule.when}` ({rule.name.split('.')[0]})": by_rule(rule.name) for rule in chosen}


def _section(half: str, all_cases: Sequence[Case], rows: dict[str, Wanted]) -> str:
    here = [case for case in _ramped(all_cases) if half in ("all", case.recipe.half)]
    title = "### Both halves" if half == "all" else f"### The {half} half"
    return f"{title}\n\n" + _table(SCORE_HEAD, (_row(name, score(here, wanted)) for name, wanted in rows.items()))


def _row(name: str, x: Score) -> Sequence[str]:
    low, high = interval(x.leads)
    quartiles = np.percentile(x.leads, [25, 75]) if x.leads else (np.nan, np.nan)
    return (
        name,
        _rate(x.found, x.positives),
        str(x.late),
        f"{np.median(x.leads):.0f} [{low:.0f}, {high:.0f}]" if x.leads else "",
        f"{quartiles[0]:.0f} to {quartiles[1]:.0f}" if x.leads else "",
        str(min(x.leads, default="")),
        _rate(x.wolf, x.healthy),
    )


def _rate(hits: int, of: int) -> str:
    if not of:
        return "0 of 0"
    low, high = share_interval(hits, of)
    return f"{hits} of {of}" + (f" [{low:.0%}, {high:.0%}]" if 0 < hits < of else "")


def _runs(all_cases: Sequence[Case]) -> str:
    labels = (*COLLAPSE, *OTHER, *SOUND, IMPAIRED)
    count = Counter((case.truth.label, half) for case in all_cases for half in ("all", case.recipe.half))
    table = _table(
        ("became", "runs", *HALVES),
        ((label, *(str(count[label, half]) for half in ("all", *HALVES))) for label in labels),
    )
    other = [
        f"- `{c.recipe.name}` was meant to be {c.recipe.label}, became {c.truth.label} (final "
        f"loss {c.truth.final:.2f}, {c.truth.worse:+.2f} to its reference, {c.truth.saturated[1]:.0%} saturated)"
        for c in all_cases
        if not c.as_meant
    ]
    return table + "\n\n" + ("Not what they were meant to be:\n\n" + "\n".join(other) if other else "All as meant.")


def _mistakes(all_cases: Sequence[Case]) -> str:
    found = []
    either = score(_ramped(all_cases), by_rule(*COLLAPSE_RULES))
    for name in either.missed:
        case = next(c for c in all_cases if c.recipe.name == name)
        found.append(f"- missed: `{name}` ({case.truth.label})")
    for case in all_cases:
        for alert in case.fired(by_severity("critical", "warning")):
            if case.truth.label in SOUND:
                found.append(
                    f"- false {alert.severity}: `{case.recipe.name}` ({case.truth.label}): `{alert.rule}` at step "
                    f"{alert.fired_step}, {alert.place}, {alert.share:.0%} of the heads"
                )
    return "\n".join(found) or "None."


def _order(all_cases: Sequence[Case], chosen: Sequence[Rule]) -> str:
    """Of the divergent runs, in how many each predictor fired first and at what median step before the onset."""
    here = _ramped(all_cases)
    divergent = [case for case in here if case.truth.onset is not None and case.truth.label in COLLAPSE]
    rows: dict[str, Wanted] = {f"`{name}` (rule)": by_rule(name) for name in COLLAPSE_RULES} | _line_wanted(chosen)
    first: Counter[str] = Counter()
    for case in divergent:
        leads = {name: case.lead(wanted) for name, wanted in rows.items()}
        best = max((lead for lead in leads.values() if lead is not None), default=None)
        first.update(name for name, lead in leads.items() if lead is not None and lead == best)
    scores = {name: score(here, wanted) for name, wanted in rows.items()}
    middle = {name: float(np.median(x.leads)) if x.leads else -np.inf for name, x in scores.items()}
    order = sorted(rows, key=lambda name: -middle[name])
    calm = next((name for name in order if scores[name].wolf == 0), None)
    top = scores[order[0]]
    answer = (
        f"Over {len(divergent)} divergent runs of both halves {order[0]} comes first: {middle[order[0]]:.0f} steps "
        f"before the onset (median), at the price of {top.wolf} false alarms in {top.healthy} sound runs. "
    )
    if calm is not None:
        answer += f"The first one without a false alarm is {calm}: {middle[calm]:.0f} steps."
    table = _table(
        ("", "median lead", "first in", "found", "false alarms"),
        (
            (name, f"{middle[name]:.0f}", str(first[name]), f"{x.found} of {x.positives}", f"{x.wolf} of {x.healthy}")
            for name in order
            for x in [scores[name]]
        ),
    )
    return f"{answer}\n\n{table}"


def _jumps(all_cases: Sequence[Case]) -> str:
    def row(case: Case) -> Sequence[str]:
        told = dict.fromkeys(a.rule for a in case.fired(by_severity("critical", "warning")))
        first = (f"`{rule}` {case.fired(by_rule(rule))[0].fired_step}" for rule in told)
        onset = "" if case.truth.onset is None else str(case.truth.onset)
        return f"`{case.recipe.name}`", case.truth.label, onset, ", ".join(first)

    return _table(("recipe", "became", "onset", "fired"), [row(case) for case in all_cases if case.recipe.abrupt])


def _others(all_cases: Sequence[Case], rules: Sequence[Rule]) -> str:
    names = {rule.name for rule in rules}
    return _table(
        ("failure", "rule", "found", "false alarms"),
        (
            (label, f"`{name}`", _rate(x.found + x.late, x.positives), _rate(x.wolf, x.healthy))
            for label, name in zip(OTHER, OTHER_RULES, strict=True)
            if name in names
            for x in [score(all_cases, by_rule(name), (label,))]
        ),
    )


def _thinned(runs: Sequence[Known], rules: Sequence[Rule]) -> str:
    chosen = [rule for rule in rules if rule.name in COLLAPSE_RULES]
    rows = [
        (f"every {5 * thin} steps", *_row("", score(_ramped(cases(runs, chosen, thin)), by_rule(*COLLAPSE_RULES)))[1:])
        for thin in THINS
    ]
    return "The collapse rules with every sample, every second and every fourth; both halves.\n\n" + _table(
        SCORE_HEAD, rows
    )


def _sampled(groups: Sequence[tuple[Recipe, list[Run]]], rules: Sequence[Rule]) -> str:
    chosen = [rule for rule in rules if rule.name in COLLAPSE_RULES]
    parts = []
    for base, runs in groups:
        same = all(np.array_equal(run.scalar("loss")[1], runs[0].scalar("loss")[1]) for run in runs)
        parts += [
            f"### `{base.name}`: {base.length} positions, watched with 16, 64 and all rows",
            f"The losses of the three runs are {'identical' if same else 'NOT identical'}. Error against all rows, "
            "middle / 95th percentile over heads and samples:",
            _table(("", "16 rows", "64 rows"), sampling.stray(runs)),
            "The step at which each rule fired, by cadence and rows:",
            _table(("every", "rule", "16 rows", "64 rows", "all rows"), sampling.verdicts(runs, chosen)),
        ]
    return "\n\n".join(parts)


def _every(all_cases: Sequence[Case]) -> str:
    def row(case: Case) -> Sequence[str]:
        x, recipe = case.truth, case.recipe
        alerts = case.fired(by_severity("critical", "warning"))
        told = dict.fromkeys(f"{alert.rule} {alert.fired_step}" for alert in alerts if alert.rule in COLLAPSE_RULES)
        lead = case.lead(by_rule(*COLLAPSE_RULES))
        return (
            f"`{recipe.name}`", recipe.half, x.label, f"{x.final:.2f} ({x.worse:+.2f})", f"{x.saturated[1]:.0%}",
            "" if x.onset is None else str(x.onset), "; ".join(told), "" if lead is None else str(lead),
        )  # fmt: skip

    head = ("recipe", "half", "became", "final loss (to reference)", "saturated", "onset", "fired", "lead")
    return _table(head, map(row, all_cases))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines_ = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines_)
