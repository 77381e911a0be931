"""Parts of an SVG chart: scales, ticks, thinned paths, and elements that escape whatever text they are given.

Coordinates of long paths are whole quarter pixels, relative to the point before: 200 points take about 1 kB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike, NDArray

from attnwatch.monitor.outputs.log import one_line

Floats = NDArray[np.float64]

MINUS = "\N{MINUS SIGN}"
LARGEST = 1e300
"""What lies beyond is drawn at the edge: differences and air around it must stay numbers."""
FINE = 4
"""Path units to a pixel; paths are drawn inside a group that scales by 1 / FINE."""


def element(name: str, *children: object, **attributes: object) -> Markup:
    """One SVG or HTML element. Text and attribute values are escaped, Markup children are not; `class_` is `class`
    and `stroke_width` is `stroke-width`. Attributes that are None are left out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(
        Markup(name), written, Markup("").join(escape(_legible(child)) for child in children)
    )


def _attribute(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else _legible(value)


def _legible(value: object) -> object:
    """Text without characters that are not seen or turn what follows around."""
    return one_line(value) if type(value) is str else value


@dataclass(frozen=True)
class Scale:
    """Maps data in [low, high] to pixels in [start, end], clipping what lies outside; NaN stays NaN."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: ArrayLike) -> Floats:
        data = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.log:
            # Zero and below have no logarithm: they lie on the lower edge.
            data = np.log10(np.where(data > 0, data, np.where(np.isnan(data), np.nan, low)))
            low, high = log10(low), log10(high)
        share = (np.clip(data, low, high) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def at(self, value: float) -> float:
        return float(self(value))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, count: int) -> list[float]:
        """About `count` round values inside the scale: powers of ten on a log scale that has two of them."""
        if self.log:
            first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
            if last > first:
                return [10.0**power for power in range(first, last + 1, max(1, ceil((last - first) / count)))]
        return round_values(self.low, self.high, count)


def round_values(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], as near to `count` of them as there are."""
    rough = high / max(count, 1) - low / max(count, 1)  # the difference itself may overflow
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    multiples = [index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
    return list(dict.fromkeys(float(f"{value:.12g}") for value in multiples))  # neighbours beyond 12 digits are one


def limits(*arrays: ArrayLike, pad: float = 0.06) -> tuple[float, float]:
    """Lowest and highest finite value with some air around them; (0, 1) when there is none. Never beyond LARGEST."""
    data = finite(*arrays)
    if not data.size:
        return 0.0, 1.0
    low, high = float(data.min()), float(data.max())
    air = (high - low) * pad or abs(high) * pad or 1.0
    # A quantity that is never negative does not get a negative axis.
    return (max(low - air, 0.0) if low >= 0 else low - air), high + air


def log_limits(*arrays: ArrayLike, spread: float) -> tuple[float, float] | None:
    """Limits of a log axis; None where a value is not positive, or the highest not `spread` times the lowest."""
    data = finite(*arrays)
    if not data.size or data.min() <= 0 or data.max() / spread <= max(data.min(), 1 / LARGEST):
        return None
    return max(float(data.min()) / 1.3, 1 / LARGEST), float(data.max()) * 1.3


def finite(*arrays: ArrayLike) -> Floats:
    """All finite values of the arrays in one row, none of them beyond LARGEST."""
    data = np.concatenate([np.zeros(0), *(np.asarray(array, dtype=np.float64).ravel() for array in arrays)])
    known: Floats = np.clip(data[np.isfinite(data)], -LARGEST, LARGEST)
    return known


def span(first: float, last: float) -> tuple[float, float]:
    """The range of an axis of steps: never empty, however large the numbers."""
    return float(first), max(float(last), float(first) + max(1.0, abs(float(first)) * 1e-9))


def number(value: float | None) -> str:
    """A number for people: three digits, thousands apart, 'unknown' for what was not measured."""
    if value is None or np.isnan(value):
        return "unknown"
    if not isfinite(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}".replace("-", MINUS)
    text = f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:.3g}"
    return text.replace("-", MINUS)


def copyable(value: float | None) -> str:
    """A number for programs and spreadsheets: six digits, no separator; empty for what was not measured."""
    return "" if value is None or np.isnan(value) else f"{value:.6g}"


def bins(count: int, limit: int) -> NDArray[np.intp]:
    """First index of each of at most `limit` even groups of `count` things."""
    edges = np.linspace(0, count, min(count, limit) + 1).astype(np.intp)
    return edges[:-1]


def thin(x: ArrayLike, y: ArrayLike, limit: int = 500) -> tuple[Floats, Floats]:
    """At most `limit` points of a line that keep every peak: the lowest and the highest of each group, in order.

    NaN is kept as a gap only where a whole group is NaN. x, y: `[N]`.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) <= limit:
        return xs, ys
    starts = bins(len(xs), limit // 2)
    kept: list[int] = []
    for first, last in zip(starts, [*starts[1:], len(xs)], strict=True):
        group = ys[first:last]
        if np.isnan(group).all():
            kept.append(int(first))
        else:
            kept += sorted({int(first + np.nanargmin(group)), int(first + np.nanargmax(group))})
    return xs[kept], ys[kept]


def path(x: Floats, y: Floats) -> str:
    """SVG path data of a line in pixels, broken where y is not finite. A point between two gaps is a dot."""
    parts: list[str] = []
    for run in _unbroken(np.isfinite(y) & np.isfinite(x)):
        points = np.stack([x[run], y[run]], axis=1) * FINE
        whole = np.round(points).astype(np.int64)
        moves = "".join(_pair(dx, dy) for dx, dy in np.diff(whole, axis=0).tolist() if dx or dy)
        parts.append(f"M{whole[0, 0]} {whole[0, 1]}" + (f"l{moves.lstrip()}" if moves else "h0"))
    return "".join(parts)


def area(x: Floats, low: Floats, high: Floats) -> str:
    """SVG path data of the closed band between two lines, in pixels; gaps as in `path`."""
    parts: list[str] = []
    for run in _unbroken(np.isfinite(low) & np.isfinite(high)):
        there = path(x[run], low[run])
        back = path(x[run][::-1], high[run][::-1])
        parts.append(f"{there}L{back[1:]}Z")
    return "".join(parts)


def _pair(dx: int, dy: int) -> str:
    return f" {dx}{'' if dy < 0 else ' '}{dy}"


def _unbroken(known: NDArray[np.bool_]) -> list[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def fine(*children: object) -> Markup:
    """The group that paths made by `path` and `area` are drawn in."""
    return element("g", *children, transform=f"scale({1 / FINE})", class_="fine")


def window(x: float, y: float, width: float, height: float, *children: object) -> Markup:
    """The part of a picture that the page's script moves and stretches along the steps; what leaves it is not seen."""
    moved = element("g", *children, class_="zoom")
    return element(
        "svg", moved, x=x, y=y, width=width, height=height, viewBox=f"{x} {y} {width} {height}", class_="plot"
    )


def step_axis(x: Scale, ticks: Iterable[float], top: float, bottom: float, text: float) -> Markup:
    """Uprights from top to bottom and the steps at height `text`; the script writes them anew when it zooms."""
    drawn = [
        (rule(x.at(tick), top, x.at(tick), bottom, "grid"), label(x.at(tick), text, number(tick)))
        for tick in ticks
        if tick == int(tick)  # there are no halves of steps
    ]
    parts = [part for pair in drawn for part in pair]
    return element("g", *parts, class_="steps", data_top=float(top), data_bottom=float(bottom), data_text=float(text))


def svg(
    width: float, height: float, title: str, description: str, *children: object, class_: str = "", **attributes: object
) -> Markup:
    """A picture that a screen reader can name."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{title}. {description}",
        class_=class_ or None,
        **attributes,
    )


def label(x: float, y: float, text: str, class_: str = "tick", anchor: str = "middle") -> Markup:
    return element("text", text, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def rule(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)
