"""Numbers as characters: a digit for a value, a row of blocks for a history. All of it reads without colour."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.style import Style

from attnwatch.reports import heat
from attnwatch.reports.charts import bins
from attnwatch.reports.heads import Colours

UNMEASURED, NOT_FINITE, NO_HEAD = "-", "!", " "
BLOCKS = {False: "▁▂▃▄▅▆▇█", True: ".:-=+*#@"}
"""From low to high; the second where the terminal knows ASCII only."""

_RAMP = heat.RAMPS["dark"]


def digits(values: NDArray[np.floating], scale: Colours) -> NDArray[np.str_]:
    """Of each value a character: 0 (the quiet end of the scale) to 9 (the loud one), `-` for NaN, `!` for infinity."""
    levels = heat.levels(values, scale.quiet, scale.loud, log=scale.log).astype(np.int64)
    text = np.clip((levels - 1) * 10 // (heat.LEVELS - 1), 0, 9).astype("U1")
    text[np.isnan(values)] = UNMEASURED
    text[np.isinf(values)] = NOT_FINITE
    return text


def style(character: str) -> Style:
    """Colours of one character of `digits`: from dark to light one way only, so that every eye sees one order."""
    if character == NOT_FINITE:
        return _STYLES[9]
    return _STYLES[int(character)] if character.isdecimal() else Style(dim=True)


def _style(digit: int) -> Style:
    colour = _RAMP[round(digit * (len(_RAMP) - 1) / 9)]
    return Style(color="#ffffff" if digit < 6 else "#000000", bgcolor=colour)


_STYLES = tuple(_style(digit) for digit in range(10))


def sparkline(values: ArrayLike, width: int, ascii_only: bool = False) -> str:
    """At most `width` characters of a history `[N]`: the mean of each stretch, blank where nothing was measured (NaN),
    `!` where a value was infinite. The lowest is the first block; the highest twentieth shares the last one, so that
    one peak does not flatten the rest."""
    data = np.asarray(values, dtype=np.float64)
    if not data.size or width < 1:
        return ""
    starts = bins(len(data), width)
    finite = np.isfinite(data)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, np.clip(data, -1e300, 1e300) / len(data), 0.0), starts)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)  # of data / N: no sum overflows
    broken = np.logical_or.reduceat(np.isinf(data), starts)
    known = means[counts > 0]
    blocks = BLOCKS[ascii_only]
    if not known.size:
        return "".join(NOT_FINITE if bad else " " for bad in broken)
    low, high = float(known.min()), float(np.quantile(known, 0.95, method="higher"))
    span = high - low if high > low else float(known.max()) - low or 1.0
    shares = np.clip((np.nan_to_num(means, nan=low) - low) / span, 0.0, 1.0)
    places = np.minimum((shares * len(blocks)).astype(np.int64), len(blocks) - 1)
    return "".join(
        NOT_FINITE if bad else blocks[place] if count else " "
        for bad, place, count in zip(broken, places, counts, strict=True)
    )


def short(value: float) -> str:
    """A number in three digits, in ASCII; "unknown" for what was not measured."""
    return "unknown" if np.isnan(value) else f"{value:.3g}"


def duration(seconds: float) -> str:
    """ "8 s", "5 min", "3 h", "2 days": one unit, rounded down."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= (2 if unit != "min" else 1.5) * size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{int(seconds)} s"
