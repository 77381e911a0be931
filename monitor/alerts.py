"""The alert: what it says, and its life as a pure function. Time is an argument; nothing here keeps state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import NamedTuple

from attnwatch.monitor.sample import UsageError

SEVERITIES = ("info", "warning", "critical")
"""From the mildest to the gravest."""

# Width and precision of at most two digits: a format may not ask for a gigabyte of blanks.
_FORMAT = re.compile(r"[-+,]?[0-9]{0,2}(\.[0-9]{1,2})?[defgs%]?")


@dataclass(frozen=True)
class Alert:
    """One alert. Rule and place are its identity; the rest is the record of a moment.

    state: "pending" (met, not yet for long enough), "firing" or "resolved". A pending alert that is met no more
    never fired: it is told once as "resolved" with `fired_step` None, and then forgotten.
    place: "model", a layer's name, or "layer/head".
    pending_step: first step of the streak that led here. resolved_step: the step that ended it.
    share (of the known heads of the place), heads (`(layer, head)`, worst first, at most 8), values (what the rule
    names, at the worst head; NaN where not known), summary and advice: as the alert fired, before that as it
    became pending.
    """

    rule: str
    severity: str
    state: str
    place: str
    pending_step: int
    fired_step: int | None
    resolved_step: int | None
    share: float
    heads: tuple[tuple[str, int], ...]
    values: dict[str, float]
    summary: str
    advice: str


class TrainingStopped(Exception):  # noqa: N818 (a public name: it says what happened)
    """Raised from `Monitor.step` when an alert of the severity given as `stop_on` fired; `alert` is that alert."""

    def __init__(self, alert: Alert):
        super().__init__(f"{alert.rule} ({alert.severity}) at {alert.place}, step {alert.fired_step}: {alert.summary}")
        self.alert = alert


class Life(NamedTuple):
    """An alert and how many samples in a row it was met (while pending) or quiet (while firing)."""

    alert: Alert
    streak: int


def advance(
    life: Life | None,
    verdict: bool | None,
    step: int,
    *,
    hold: int,
    keep: int,
    see: Callable[[int], Alert],
) -> Life | None:
    """The life after one more sample; None while there is nothing to tell.

    verdict: met, quiet, or None for unknown, which moves nothing. `hold` met samples in a row fire, `keep` quiet
    ones in a row resolve; a resolved life is over, and what follows it is a new one.
    see: the pending alert as this sample shows it, given its pending step; called only where a record is made.
    """
    if life is not None and life.alert.state == "resolved":
        life = None
    if verdict is None:
        return life
    if life is not None and life.alert.state == "firing":
        streak = 0 if verdict else life.streak + 1
        over = streak >= keep
        return Life(replace(life.alert, state="resolved", resolved_step=step) if over else life.alert, streak)
    if not verdict:
        return life and Life(replace(life.alert, state="resolved", resolved_step=step), 0)
    pending_step, streak = (step, 1) if life is None else (life.alert.pending_step, life.streak + 1)
    if streak >= hold:
        return Life(replace(see(pending_step), state="firing", fired_step=step), 0)
    return Life(see(pending_step) if life is None else life.alert, streak)


class Wording:
    """A text with `{field}` and `{field:.2f}`, checked when it is made, filled in when an alert is.

    Only plain names and number formats: no attribute, index, conversion or nested format, so that a rule from
    elsewhere can neither reach into an object nor ask for an endless string.
    """

    def __init__(self, text: str, examples: Mapping[str, object]) -> None:
        """examples: a value of the right type for every field that exists. Raises UsageError."""
        try:
            self._pieces = list(Formatter().parse(text))
        except ValueError as error:
            raise UsageError(f"expected text with {{field}} in it, found {str(error).lower()}") from None
        for _, field, form, conversion in self._pieces:
            if field is None:
                continue
            if field not in examples:
                raise UsageError(f"no field {field[:40]!r}; there are: {', '.join(examples)}")
            if conversion or not _FORMAT.fullmatch(form or ""):
                found = form or f"!{conversion}"
                raise UsageError(f"expected a format such as {{{field}:.2f}}, found {found[:40]!r}")
            try:
                format(examples[field], form or "")
            except ValueError as error:
                raise UsageError(f"field {field!r} does not take the format {form!r}: {error}") from None

    def fill(self, fields: Mapping[str, object]) -> str:
        """The text of one alert."""
        return "".join(
            text + ("" if field is None else format(fields[field], form or "")) for text, field, form, _ in self._pieces
        )
