"""Tables of Markdown, and a score as a row of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from benchmarks.detection.score import Score, interval, share_interval

SCORE_HEAD = ("", "found", "late", "lead: median", "quartiles", "least", "false alarms")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def score_row(name: str, x: Score) -> Sequence[str]:
    """Below SCORE_HEAD."""
    low, high = interval(x.leads)
    quartiles = np.percentile(x.leads, [25, 75]) if x.leads else (np.nan, np.nan)
    return (
        name,
        rate(x.found, x.positives),
        str(x.late),
        f"{np.median(x.leads):.0f} [{low:.0f}, {high:.0f}]" if x.leads else "",
        f"{quartiles[0]:.0f} to {quartiles[1]:.0f}" if x.leads else "",
        str(min(x.leads, default="")),
        rate(x.wolf, x.healthy),
    )


def rate(hits: int, of: int) -> str:
    """With its bootstrap interval, which has no width when all or none are hit."""
    if not of:
        return "0 of 0"
    low, high = share_interval(hits, of)
    return f"{hits} of {of}" + (f" [{low:.0%}, {high:.0%}]" if 0 < hits < of else "")


def middle(x: Score) -> str:
    """Median lead."""
    return f"{np.median(x.leads):.0f}" if x.leads else "none"
