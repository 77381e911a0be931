"""Heat maps over layers and heads as one palette PNG: all frames of a metric, one below the other, a pixel a head."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

LEVELS = 63
"""Colours of the scale. Index 0 of the palette is transparent: a head that was not measured."""

_ANCHORS = ("#f7f1e3", "#f3d9a4", "#eeb265", "#e08048", "#c24c47", "#8f2a54", "#541b52", "#220f35")
"""Falls steadily in lightness, so that it reads the same in grey and to every kind of colour vision."""


def palette() -> NDArray[np.uint8]:
    """`[LEVELS, 3]`, pale to dark."""
    anchors = np.array([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in _ANCHORS], dtype=np.float64)
    place = np.linspace(0, len(anchors) - 1, LEVELS)
    channels = [np.interp(place, np.arange(len(anchors)), anchors[:, c]) for c in range(3)]
    return np.round(np.stack(channels, axis=1)).astype(np.uint8)


def levels(values: NDArray[np.floating], low: float, high: float, *, log: bool = False) -> NDArray[np.uint8]:
    """Palette index of each value: 1 (low) to LEVELS (high), 0 for NaN. `low > high` turns the scale round."""
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
