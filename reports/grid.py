"""Layers x heads of one metric as lines of digits, cut to what a screen holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from rich.text import Text

from attnwatch.reports.charts import limits
from attnwatch.reports.glyphs import NO_HEAD, NOT_FINITE, UNMEASURED, digits, short, style
from attnwatch.reports.heads import SIGNATURE, Colours
from attnwatch.reports.words import UNIT_INTERVAL

LABEL = 24
"""Characters of a layer's name at most."""


@dataclass(frozen=True, eq=False)
class Grid:
    """What is shown of one metric.

    names: of the layers, short. notes: what is said in place of a layer's heads, "" for a measured one. widths: heads
    of each layer, 0 while unknown. values `[L, H]`: NaN where not measured.
    """

    metric: str
    names: tuple[str, ...]
    notes: tuple[str, ...]
    widths: tuple[int, ...]
    values: NDArray[np.float64]

    @property
    def scale(self) -> Colours:
        """Fixed for the metrics of collapse, else what the values span now."""
        if self.metric in SIGNATURE:
            return SIGNATURE[self.metric]
        return Colours(0.0, 1.0) if self.metric in UNIT_INTERVAL else Colours(*limits(self.values))

    @property
    def characters(self) -> NDArray[np.str_]:
        """`[L, H]`: a digit for each head that there is, blank elsewhere."""
        layers, heads = self.values.shape
        known = [0 if note else width or heads for note, width in zip(self.notes, self.widths, strict=True)]
        is_head = np.arange(heads) < np.array(known, np.int64).reshape(layers, 1)
        return np.where(is_head, digits(self.values, self.scale), NO_HEAD)


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names without the parts (between dots) with which all of them begin or end."""
    parts = [name.split(".") for name in names]
    if len(parts) < 2:
        return tuple(names)
    shortest = min(map(len, parts))
    begin = next((at for at in range(shortest) if len({each[at] for each in parts}) > 1), shortest - 1)
    room = shortest - begin - 1  # something must stay of each
    end = next((at for at in range(room) if len({each[-1 - at] for each in parts}) > 1), room)
    return tuple(".".join(each[begin : len(each) - end]) for each in parts)


def lines(grid: Grid, layer: int, head: int, width: int, height: int) -> list[Text]:
    """At most `height` lines (a title, a scale, a ruler, a line a layer) around the chosen head, which they mark."""
    layers, heads = grid.values.shape
    label = min(max((len(name) for name in grid.names), default=0), LABEL, max(width // 4, 4))
    cell = 2 if label + 2 + 2 * heads <= width else 1
    across = max(min(heads, (width - label - 2) // cell), 1)
    left = _start(head, across, heads)
    rows = max(min(layers, height - 3), 1)
    top = _start(layer, rows, layers)
    text = grid.characters
    shown = [Text(_title(grid, (top, rows, layers), (left, across, heads)), style="bold"), Text(_legend(grid, text))]
    shown.append(Text(" " * (label + 2) + _ruler(head, left, across, cell), style="dim"))
    for row in range(top, top + rows):
        name = grid.names[row]
        name = name if len(name) <= label else ".." + name[2 - label :]
        line = Text(f"{'>' if row == layer else ' '}{name:>{label}} ", style="bold" if row == layer else "")
        if grid.notes[row]:
            line.append(grid.notes[row], "yellow")
        else:
            for column in range(left, left + across):
                character = str(text[row, column])
                here = style(character)
                chosen = row == layer and column == head
                line.append(f"{character:<{cell}}", here + Style(reverse=True, bold=True) if chosen else here)
        shown.append(line)
    return shown


def _start(chosen: int, shown: int, count: int) -> int:
    """Where a window of `shown` of `count` begins, with the chosen one in its middle where it can."""
    return int(np.clip(chosen - shown // 2, 0, max(count - shown, 0)))


def _title(grid: Grid, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> str:
    parts = [grid.metric]
    for what, (start, shown, count) in (("layer", rows), ("head", columns)):
        some = f"{what}s {start}-{start + shown - 1} of {count}"
        parts.append(some if shown < count else f"{count} {what}{'s' if count > 1 else ''}")
    return ", ".join(parts)


def _legend(grid: Grid, text: NDArray[np.str_]) -> str:
    """What the digits mean, and where the extremes are: they may lie outside of what is shown."""
    scale, values = grid.scale, grid.values
    parts = [f"0 = {short(scale.quiet)} ... 9 = {short(scale.loud)}"]
    parts += [f"{UNMEASURED} not measured"] if (text == UNMEASURED).any() else []
    parts += [f"{NOT_FINITE} not finite"] if (text == NOT_FINITE).any() else []
    finite = np.where(np.isfinite(values), values, np.nan)
    if not np.isnan(finite).all():
        for what, at in (("lowest", np.nanargmin(finite)), ("highest", np.nanargmax(finite))):
            layer, head = np.unravel_index(at, values.shape)
            parts.append(f"{what} {short(finite[layer, head])} at {grid.names[layer]}/{head}")
    return "; ".join(parts)


def _ruler(head: int, left: int, across: int, cell: int) -> str:
    """Every tenth head by number (every fifth where there is room), and a `v` over the chosen one."""
    step = 10 if cell == 1 else 5
    marks = [NO_HEAD] * (across * cell)
    for number in range(left, left + across):
        if number % step == 0:
            at, name = (number - left) * cell, str(number)
            if at + len(name) <= len(marks):
                marks[at : at + len(name)] = name
    marks[(head - left) * cell] = "v"
    return "".join(marks)
