"""Which number moved first: single predictors, the first warning and the divergence of one run, by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.leads import warnings
from attnwatch.monitor.predictors import Crossing

ONE_RUN = (
    "A number has crossed when a quarter of the heads were past its line in three samples in a row (grad_norm: three "
    "steps). The order in one run proves nothing about another: such numbers also cross in runs that stay healthy."
)


class Row(NamedTuple):
    """Cells of the table. what: a line, a rule or the loss. before: steps from there to the onset of divergence."""

    what: str
    step: str
    before: str
    remark: str
    is_line: bool


def order(alerts: Iterable[Alert], start: int | None, crossings: Sequence[Crossing]) -> list[Row]:
    """What moved, first one first, then what did not. start: the onset of divergence."""
    moved = [(each.step, Row(each.line, *_when(each.step, start), "", True)) for each in crossings if _moved(each)]
    for alert in warnings(alerts)[:1]:
        moved.append(
            (alert.fired_step, Row(f"{alert.rule} fires", *_when(alert.fired_step, start), alert.severity, False))
        )
    if start is not None:
        moved.append((start, Row("the loss diverges", f"{start:,}", "", "", False)))
    rows = [row for _, row in sorted(moved, key=lambda each: each[0] or 0)]
    return rows + [Row(each.line, "", "", _why(each), True) for each in crossings if not _moved(each)]


def _moved(crossing: Crossing) -> bool:
    return crossing.step is not None and not crossing.from_start


def _when(step: int | None, start: int | None) -> tuple[str, str]:
    if step is None:
        return "", ""
    return f"{step:,}", "" if start is None else f"{start - step:,}"


def _why(crossing: Crossing) -> str:
    if crossing.from_start:
        return "past its line from the start"
    return "did not cross" if crossing.measured else "not measured"
