"""The figures as a page of Markdown."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date

import numpy as np
import torch
from benchmarks.detection import sampling
from benchmarks.detection.markdown import SCORE_HEAD, middle, rate, score_row, table
from benchmarks.detection.recipe import COLLAPSE, OTHER, SOUND, Recipe
from benchmarks.detection.score import Case, Score, by_rule, by_severity, score
from benchmarks.detection.study import PARTS, Known, ablated, cases, lines, measures, swept
from benchmarks.detection.truth import IMPAIRED

import attnwatch
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.rules import Rule
from attnwatch.monitor.run import Run

Wanted = Callable[[Alert], bool]
COLLAPSE_RULES = ("sparse_low_rank", "entropy_collapse")
OTHER_RULES = ("sinks_lost", "attention_uniform")
"""The rules for the failures of recipe.OTHER, in its order."""
THINS = (1, 2, 4)
BY_PART = tuple(f"{part}: found, median lead, false alarms" for part in PARTS)


def pages(runs: Sequence[Known], sampled: Sequence[tuple[Recipe, list[Run]]], rules: Sequence[Rule]) -> tuple[str, str]:
    """The figures and the list of all runs. sampled: as `sampling.groups` gives them."""
    single = lines(runs)
    chosen = [rule for rule in single if all(measures(x.run, rule) for x in runs)]
    late = [rule for rule in single if rule not in chosen]
    collapse = [rule for rule in rules if rule.name in COLLAPSE_RULES]
    tried = [*(rule for rule, *_ in swept(collapse)), *(rule for rule, _ in ablated(collapse))]
    all_cases = cases(runs, [*rules, *single, *tried])
    later = [case for case, x in zip(all_cases, runs, strict=True) if all(measures(x.run, rule) for rule in late)]
    parts = [
        "# Detection: what the rules find, how early, and how often they cry wolf",
        "Written by `python -m benchmarks.detection table` from the runs of `python -m benchmarks.detection run`, "
        f"{date.today()}, attnwatch {attnwatch.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, one thread a run.",
        INTRODUCTION,
        _answer(all_cases, chosen),
        "## The runs",
        _runs(all_cases),
        "## The rules",
        RULES_TEXT,
        *(_section(part, all_cases, _wanted(rules)) for part in (*PARTS, "all")),
        "### False alarms and misses",
        _mistakes(all_cases),
        HELD_OUT_NOTE,
        "### How far is too far",
        SWEEP_TEXT,
        _swept(all_cases, collapse),
        "### What each condition does",
        ABLATION_TEXT,
        _ablated(all_cases, collapse),
        "## Single numbers",
        LINES_TEXT,
        *(_section(part, all_cases, _line_wanted(chosen)) for part in PARTS),
        "## Which comes first, which cries wolf",
        _order(all_cases, chosen),
        *(("### What a step changes", LATE_TEXT, _order(later, [*chosen, *late])) if late and later else ()),
        "## Rates raised at once",
        JUMPS_TEXT,
        _jumps(all_cases),
        "## Sinks lost, attention uniform",
        OTHERS_TEXT,
        _others(all_cases, rules),
    ]
    every = [
        "# Detection: every run, and fewer samples",
        "The runs of [detection.md](detection.md), by the same command.",
        "## Fewer samples",
        _thinned(runs, rules),
        _sampled(sampled, rules),
        "## Every run",
        _every(all_cases),
    ]
    return "\n\n".join(parts) + "\n", "\n\n".join(every) + "\n"


INTRODUCTION = """\
The runs are small transformers trained for seconds to two minutes on the source of Python's standard library and on
scikit-learn's digits; some sound ones on made-up tasks (copying, sorting, recall, the largest of all), which such
models solve perfectly and with heads as sharp as healthy heads get. A run's label is not assumed: what became of it
is read off its loss (and, for the kind of failure, off its heads), and a run that did not become what it was meant to
be counts as what it became. `diverges`: the mean of 20 losses stays 0.3 nat (digits: 0.5) above its lowest for 40
steps, or the loss is no number, with a quarter of the heads saturated. `collapses`: no divergence, but a final loss at
least 0.1 nat worse than a healthy recipe's on the same data, with a quarter of the heads saturated. `overflows`:
float16 attention whose loss diverges on its way to NaN, with a quarter of the heads saturated. `spikes`: divergence
with sound heads. `healthy`: within 0.1 nat of the reference (without a reference: of its own lowest). `impaired`: worse
than that with sound heads; counted nowhere.

The recipes have three parts. *tuning* and *report* are halves by a hash of the name. The first rules were looked for on
the tuning half; false alarms on the report half (`copy_previous_2`, `sane_wide_long`) and in sound runs outside of the
benchmark (a decoder with RoPE, copying, recall, the largest of all) then led to the rules as they are. So both halves
were seen when the rules were chosen, and their figures flatter. The *held out* recipes were made and run after the
rules were fixed, and nothing was changed after their figures were seen: these are the ones to believe. Of their sound
runs, `bos_rope_*`, `copy_string*`, `recall*`, `maximum*`, `wide_long_*` and `copy_previous_*` are of kinds that had
misled earlier rules, with other seeds and depths; the rest, like all their collapses, are of tasks, depths, sizes,
rates or seeds not run before. It is one project's idea of what may happen, at toy scale.
[Every run](detection-runs.md) is listed by itself, with what fewer samples change.

The runs of the two halves are some hours older than the held-out ones. Eight of them (six drawn at random, and
`qwen3_high` and `images_seed_0`), trained again with the code of the latter, gave the same losses bit for bit and the
same alerts."""

RULES_TEXT = """\
*found*: runs whose attention collapsed with an alert, on divergent runs one that fired before the onset and still
stood there. *late*: divergent runs with an alert only at the onset or after: it warned of nothing. *lead*: steps from
that alert to the onset, on divergent runs. *false alarms*: runs with sound attention and such an alert. In brackets
95 % bootstrap intervals (percentile, 1,000 resamples of the runs); they have no width when none or all of n are hit,
where the truth may still be about 3/n off."""

HELD_OUT_NOTE = """\
Of the held-out runs, `copy_previous_rope` is a false alarm indeed: heads that copy the byte before, with logits that go
on growing to 330. The exemption `map_rank > 2 * start(map_rank)` of earlier rules would have kept it quiet, and the
critical rule late on `copy_high`; on the runs seen before it changed no verdict. `own_map_high` counts as sound because
it was given no reference and its loss does not rise; it has learned nothing, though (2.76, where the same task at a
lower rate ends at 2.41). Both are counted as they came, and the rules left as they were."""

SWEEP_TEXT = """\
The collapse rules with other numbers in the place of those that they compare `spread_ratio` with, everything else as
it is: what `attnwatch replay --sweep spread_ratio=a:b:n` does with runs of yours. The rules ship with numbers above the
last false alarm that was seen while they were chosen, and pay for the distance in lead."""

ABLATION_TEXT = """\
The critical collapse rule with one of its conditions left out, and each condition as a rule by itself. A condition that
can be left out here at no cost is there for models that are not here: see the notes in monitor/default_rules.toml."""

LINES_TEXT = """\
One metric and one line each: a quarter of the heads beyond it, three samples in a row. *shipped*: the line that
attnwatch compares by default (monitor/predictors.toml says where it comes from); *tuned*: the one that separates best
on the tuning part (rate of detection less rate of false alarm, then the longest median lead)."""

OTHERS_TEXT = """\
Runs with structure that lost it without a sparse collapse. `sinks_lost` is information and no alarm: healthy runs
unlearn sinks too, as its false alarms here show."""

LATE_TEXT = """\
The same of the runs that measured the spectrum of a step's first-order change, `update_rank`: all of the held-out part
and some of the others. Its line was chosen last, with all of them in sight, so its figures flatter."""

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


def _answer(all_cases: Sequence[Case], chosen: Sequence[Rule]) -> str:
    """The held-out figures in words, with the single number that does best there."""
    here = [case for case in _ramped(all_cases) if case.recipe.part == PARTS[-1]]
    if not here:
        return "No run of the held-out part is there."

    def told(x: Score) -> str:
        false = f"{x.wolf} of {x.healthy} sound runs raised it"
        return f"{x.found} of {x.positives} collapses found, median lead {middle(x)} steps; {false}"

    critical, grave = (score(here, by_severity(*s)) for s in (("critical",), ("critical", "warning")))
    singles = {name: score(here, wanted) for name, wanted in _line_wanted(chosen).items()}
    best = max(singles, key=lambda name: _youden(singles[name]))
    return (
        f"**Held out.** A critical alert: {told(critical)}. A critical alert or a warning: {told(grave)}. The single "
        f"number that separates best there, {best}: {told(singles[best])}. What each condition of the rule adds is "
        "[below](#what-each-condition-does)."
    )


def _youden(x: Score) -> float:
    return x.found / max(x.positives, 1) - x.wolf / max(x.healthy, 1)


def _section(part: str, all_cases: Sequence[Case], rows: dict[str, Wanted]) -> str:
    here = [case for case in _ramped(all_cases) if part in ("all", case.recipe.part)]
    title = "### All parts" if part == "all" else f"### The {part} part"
    scores = (score_row(name, score(here, wanted)) for name, wanted in rows.items())
    return f"{title}\n\n{table(SCORE_HEAD, scores)}"


def _swept(all_cases: Sequence[Case], rules: Sequence[Rule]) -> str:
    rows = [(f"`{was}`", f"{value:g}", *_by_part(all_cases, rule.name)) for rule, was, value in swept(rules)]
    return table(("rule", "number", *BY_PART), rows)


def _ablated(all_cases: Sequence[Case], rules: Sequence[Rule]) -> str:
    return table(("", *BY_PART), [(what, *_by_part(all_cases, rule.name)) for rule, what in ablated(rules)])


def _by_part(all_cases: Sequence[Case], name: str) -> Sequence[str]:
    """Below BY_PART."""
    found = (score([c for c in _ramped(all_cases) if c.recipe.part == part], by_rule(name)) for part in PARTS)
    return [f"{x.found} of {x.positives}, {middle(x)}, {x.wolf} of {x.healthy}" for x in found]


def _runs(all_cases: Sequence[Case]) -> str:
    labels = (*COLLAPSE, *OTHER, *SOUND, IMPAIRED)
    count = Counter((case.truth.label, part) for case in all_cases for part in ("all", case.recipe.part))
    counts = table(
        ("became", "runs", *PARTS),
        ((label, *(str(count[label, part]) for part in ("all", *PARTS))) for label in labels),
    )
    other = [
        f"- `{c.recipe.name}` was meant to be {c.recipe.label}, became {c.truth.label} (final "
        f"loss {c.truth.final:.2f}, {c.truth.worse:+.2f} to its reference, {c.truth.saturated[1]:.0%} saturated)"
        for c in all_cases
        if not c.as_meant
    ]
    return counts + "\n\n" + ("Not what they were meant to be:\n\n" + "\n".join(other) if other else "All as meant.")


def _mistakes(all_cases: Sequence[Case]) -> str:
    found = []
    either = score(_ramped(all_cases), by_rule(*COLLAPSE_RULES))
    for name in either.missed:
        case = next(c for c in all_cases if c.recipe.name == name)
        alerts = case.fired(by_rule(*COLLAPSE_RULES))
        late = f"first alert at step {alerts[0].fired_step}, " if alerts else ""
        found.append(f"- missed: `{name}` ({case.truth.label}): {late}onset {case.truth.onset}")
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
    if not any(x.leads for x in scores.values()):
        return "Nothing came before a divergence."
    middle = {name: float(np.median(x.leads)) if x.leads else -np.inf for name, x in scores.items()}
    order = sorted(rows, key=lambda name: -middle[name])
    calm = next((name for name in order if scores[name].wolf == 0), None)
    top = scores[order[0]]
    answer = (
        f"Over {len(divergent)} divergent runs {order[0]} comes first: {middle[order[0]]:.0f} steps "
        f"before the onset (median), at the price of {top.wolf} false alarms in {top.healthy} sound runs. "
    )
    if calm is not None:
        answer += f"The first one without a false alarm is {calm}: {middle[calm]:.0f} steps."
    ordered = table(
        ("", "median lead", "first in", "found", "false alarms"),
        (
            (
                name,
                f"{middle[name]:.0f}" if x.leads else "",
                str(first[name]),
                f"{x.found} of {x.positives}",
                f"{x.wolf} of {x.healthy}",
            )
            for name in order
            for x in [scores[name]]
        ),
    )
    return f"{answer}\n\n{ordered}"


def _jumps(all_cases: Sequence[Case]) -> str:
    def row(case: Case) -> Sequence[str]:
        told = dict.fromkeys(a.rule for a in case.fired(by_severity("critical", "warning")))
        first = (f"`{rule}` {case.fired(by_rule(rule))[0].fired_step}" for rule in told)
        onset = "" if case.truth.onset is None else str(case.truth.onset)
        return f"`{case.recipe.name}`", case.truth.label, onset, ", ".join(first)

    return table(("recipe", "became", "onset", "fired"), [row(case) for case in all_cases if case.recipe.abrupt])


def _others(all_cases: Sequence[Case], rules: Sequence[Rule]) -> str:
    names = {rule.name for rule in rules}
    return table(
        ("failure", "rule", "found", "false alarms"),
        (
            (label, f"`{name}`", rate(x.found + x.late, x.positives), rate(x.wolf, x.healthy))
            for label, name in zip(OTHER, OTHER_RULES, strict=True)
            if name in names
            for x in [score(all_cases, by_rule(name), (label,))]
        ),
    )


def _thinned(runs: Sequence[Known], rules: Sequence[Rule]) -> str:
    chosen = [rule for rule in rules if rule.name in COLLAPSE_RULES]
    rows = [
        (
            f"every {5 * thin} steps",
            *score_row("", score(_ramped(cases(runs, chosen, thin)), by_rule(*COLLAPSE_RULES)))[1:],
        )
        for thin in THINS
    ]
    return "The collapse rules with every sample, every second and every fourth; all parts.\n\n" + table(
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
            table(("", "16 rows", "64 rows"), sampling.stray(runs)),
            "The step at which each rule fired, by cadence and rows:",
            table(("every", "rule", "16 rows", "64 rows", "all rows"), sampling.verdicts(runs, chosen)),
        ]
    return "\n\n".join(parts)


def _every(all_cases: Sequence[Case]) -> str:
    def row(case: Case) -> Sequence[str]:
        x, recipe = case.truth, case.recipe
        alerts = case.fired(by_severity("critical", "warning"))
        told = dict.fromkeys(f"{alert.rule} {alert.fired_step}" for alert in alerts if alert.rule in COLLAPSE_RULES)
        lead = case.lead(by_rule(*COLLAPSE_RULES))
        return (
            f"`{recipe.name}`", recipe.part, x.label, f"{x.final:.2f} ({x.worse:+.2f})", f"{x.saturated[1]:.0%}",
            "" if x.onset is None else str(x.onset), "; ".join(told), "" if lead is None else str(lead),
        )  # fmt: skip

    head = ("recipe", "part", "became", "final loss (to reference)", "saturated", "onset", "fired", "lead")
    return table(head, map(row, all_cases))
