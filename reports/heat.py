"""Heat maps over layers and heads as one palette PNG: all frames of a metric, one below the other, a pixel a head."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

LEVELS = 63
"""Colours of the scale. Index 0 of the palette is transparent: a head that was not measured."""

RAMPS = {
    "light": ("#f7f1e3", "#f3d9a4", "#eeb265", "#e08048", "#c24c47", "#8f2a54", "#541b52", "#220f35"),
    "dark": ("#1d1d25", "#33203f", "#5e2354", "#93304f", "#c4483f", "#e57c3a", "#f4b75b", "#fbeec2"),
}
"""Colours for a pale and for a dark page, from the page's own to what stands out most. Lightness moves one way only, so
that each reads the same in grey and to every kind of colour vision. The pictures are grey, and grey is what shows where
a browser has no filters; the page's filters colour them."""


def table(theme: str, channel: int) -> str:
    """`tableValues` of the filter that turns grey into one channel (0 red, 1 green, 2 blue) of a ramp."""
    shares = [int(colour[1 + 2 * channel : 3 + 2 * channel], 16) / 255 for colour in RAMPS[theme]]
    return " ".join(f"{share:.3f}" for share in reversed(shares))  # the picture's high values are black


def palette() -> NDArray[np.uint8]:
    """`[LEVELS, 3]` greys, white to black."""
    greys = np.linspace(255, 0, LEVELS).round().astype(np.uint8)
    return np.repeat(greys[:, None], 3, axis=1)


def levels(values: NDArray[np.floating], low: float, high: float, *, log: bool = False) -> NDArray[np.uint8]:
    """Palette index of each value: 1 (low, white) to LEVELS (high, black), 0 for NaN.

    `low > high` turns the scale round.
    """
    data = np.asarray(values, dtype=np.float64)
    if log:
        floor = min(low, high)
        data = np.log(np.maximum(data, floor))  # maximum keeps NaN
        low, high = np.log(low), np.log(high)
    share = np.clip((data - low) / (high - low), 0.0, 1.0)
    known = ~np.isnan(share)
    return np.where(known, 1 + np.round(np.where(known, share, 0) * (LEVELS - 1)), 0).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A palette PNG of `[height, width]` palette indices."""
    height, width = pixels.shape
    rows = np.zeros((height, width + 1), dtype=np.uint8)  # each row begins with its filter: 0, none
    rows[:, 1:] = pixels
    colours = np.concatenate([np.zeros((1, 3), np.uint8), palette()])
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", colours.tobytes()),
            _chunk(b"tRNS", b"\x00"),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        ]
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def data_uri(pixels: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")


def sprite(values: NDArray[np.floating], low: float, high: float, *, log: bool = False) -> str:
    """Data URI of the frames of `[F, L, H]`, stacked: `F * L` pixels high, `H` wide."""
    frames, layers, heads = values.shape
    return data_uri(levels(values, low, high, log=log).reshape(frames * layers, heads))


def legend() -> str:
    """Data URI of the whole scale, one pixel a level."""
    return data_uri(np.arange(1, LEVELS + 1, dtype=np.uint8)[None])
