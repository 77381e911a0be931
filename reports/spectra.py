"""How the energy of W_q^T W_k is spread over its directions, at the start, at the alert and at the end of a run.

A run records four numbers of each head's spectrum, not the spectrum: the energy of the strongest direction, of the ten
strongest, how many hold 90 %, and the effective rank. The curves join the three points that these give of the
cumulative energy (a scree plot read from the other side), and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnwatch.reports import charts
from attnwatch.reports.charts import Scale, copyable, element, label, number, rule
from attnwatch.reports.known import forgotten, held
from attnwatch.reports.panels import median
from attnwatch.reports.summary import main_alert
from attnwatch.reports.worst import moments

if TYPE_CHECKING:
    from attnwatch.monitor.run import Run

NAMES = ("qk_energy_top1", "qk_energy_top10", "qk_directions_90", "qk_rank")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 190, 38, 10, 12, 40
WORST = 2
"""Heads that have a picture of their own, beside the median of all."""
LOOKS = {"start": None, "alert": "6 3", "divergence": "2 2", "end": "9 3 2 3"}
"""How the curve of each moment is dashed."""
LEGEND = {"start": "start", "alert": "main alert", "divergence": "loss diverges", "end": "end"}


@dataclass(frozen=True)
class Spectrum:
    """Of one head, or the median of all. rows: (moment, step, the four numbers as text)."""

    title: str
    picture: Markup
    rows: tuple[tuple[str, int, tuple[str, ...]], ...]


def spectra(run: Run) -> list[Spectrum]:
    """The median head and those that the main alert names first (without one, the head of lowest rank at the end)."""
    known = {metric.name for metric in run.metrics}
    if not known.issuperset(NAMES) or not len(run.steps):
        return []
    alert = main_alert(run)
    at = moments(run, alert)
    rows = np.searchsorted(run.steps, [step for _, step in at])
    gone = forgotten(run)
    values = np.stack([held(run.metric(name), gone, rows) for name in NAMES], axis=-1).astype(
        np.float64
    )  # [moment, L, H, 4]
    if not np.isfinite(values).any():
        return []
    size = max((layer.head_dim for layer in run.coverage), default=0)
    shown = [
        (
            "median of all heads",
            np.stack([median(values[..., n].reshape(len(at), -1)) for n in range(len(NAMES))], axis=-1),
        )
    ]
    for layer, head in _chosen(run, values):
        shown.append((f"{layer} head {head}", values[:, run.layers.index(layer), head]))
    highest = max(float(size), 10.0, *charts.finite(values[..., 2]))
    return [_spectrum(title, at, each, highest) for title, each in shown if np.isfinite(each).any()]


def _chosen(run: Run, values: NDArray[np.float64]) -> list[tuple[str, int]]:
    alert = main_alert(run)
    named = [] if alert is None else [(a, b) for a, b in alert.heads if a in run.layers and 0 <= b < run.heads]
    ranks = values[-1, :, :, NAMES.index("qk_rank")]
    if named or not np.isfinite(ranks).any():
        return named[:WORST]
    layer, head = np.unravel_index(np.nanargmin(ranks), ranks.shape)
    return [(run.layers[int(layer)], int(head))]


def _spectrum(title: str, at: list[tuple[str, int]], values: NDArray[np.float64], highest: float) -> Spectrum:
    """values: `[moment, 4]`."""
    x = Scale(1.0, highest, LEFT, WIDTH - RIGHT, log=True)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    last = values[-1]
    told = (
        f"Share of the energy over the number of directions. At the end one direction holds {number(last[0])} of it, "
        f"ten hold {number(last[1])}; {number(last[2])} hold 90 %."
    )
    ticks = [tick for tick in (1.0, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= highest]
    picture = charts.svg(
        WIDTH, HEIGHT, f"Cumulative energy of W_q^T W_k, {title}", told,
        *(rule(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick), "grid") for tick in (0.0, 0.5, 1.0)),
        *(label(LEFT - 6, y.at(tick) + 3.5, number(tick), "tick", "end") for tick in (0.0, 0.5, 1.0)),
        *(label(x.at(tick), HEIGHT - BOTTOM + 15, number(tick)) for tick in ticks),
        label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "directions (log), strongest first"),
        *(_curve(what, step, x, y, each) for (what, step), each in zip(at, values, strict=True)),
        class_="panel spectrum",
    )  # fmt: skip
    rows = tuple(
        (what, step, tuple(copyable(float(value)) for value in each))
        for (what, step), each in zip(at, values, strict=True)
    )
    return Spectrum(title, picture, rows)


def _curve(what: str, step: int, x: Scale, y: Scale, values: NDArray[np.float64]) -> Markup:
    """Through the points that are known, with a mark on each."""
    top1, top10, ninety, _ = (float(value) for value in values)
    known = [(1.0, top1), (10.0, top10)]
    if ninety not in (1.0, 10.0):  # there the energy itself is known, which may be more
        known.append((ninety, 0.9))
    points = sorted(point for point in known if np.isfinite(point).all() and point[0] <= x.high)
    if not points:
        return Markup("")
    places = [(x.at(at), y.at(level)) for at, level in points]
    drawn = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    return element(
        "g",
        element("title", f"{what}, step {step:,}"),
        element("path", d=drawn, class_="line", stroke_dasharray=LOOKS[what]),
        *(element("circle", cx=a, cy=b, r=2.4) for a, b in places),
        class_=f"moment-{what}",
    )
