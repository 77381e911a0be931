"""Keys of the live screen: what bytes of a terminal mean, and where they lead."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

HELP = (
    ("m, M", "next and previous metric"),
    ("arrows, h j k l", "choose a layer and a head"),
    ("page up, page down", "ten layers up or down"),
    ("home, end", "first and last head"),
    ("d, enter", "all numbers of the chosen head, and back"),
    ("?", "this page, and back"),
    ("q, Ctrl-C", "quit; training goes on"),
)
FOOTER = "q quit  ? help  m/M metric  arrows layer, head  d details"

_SEQUENCES = {
    b"A": "up", b"B": "down", b"C": "right", b"D": "left", b"H": "home", b"F": "end",
    b"1~": "home", b"4~": "end", b"5~": "page up", b"6~": "page down", b"7~": "home", b"8~": "end",
}  # fmt: skip
_ESCAPE = re.compile(rb"\x1b[\[O]([0-9;]*[A-Za-z~])")
_UNFINISHED = re.compile(rb"\x1b([\[O][0-9;]*)?\Z")
_MOVES = {
    "up": (-1, 0), "k": (-1, 0), "down": (1, 0), "j": (1, 0), "left": (0, -1), "h": (0, -1), "right": (0, 1),
    "l": (0, 1), "page up": (-10, 0), "page down": (10, 0), "home": (0, -1_000_000), "end": (0, 1_000_000),
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """What the screen shows. page: "grid", "head" or "help"."""

    metric: int = 0
    layer: int = 0
    head: int = 0
    page: str = "grid"


def decode(data: bytes) -> tuple[list[str], bytes]:
    """The keys in what a terminal sent, and the beginning of one that has not come whole.

    Sequences that mean nothing here are left out, as are characters beyond ASCII.
    """
    keys: list[str] = []
    while data:
        if found := _ESCAPE.match(data):
            keys += [_SEQUENCES[found[1]]] if found[1] in _SEQUENCES else []
            data = data[found.end() :]
        elif _UNFINISHED.match(data):
            return keys, data
        else:
            keys += [chr(data[0])] if 0x20 <= data[0] < 0x7F else ["enter"] if data[0] in b"\r\n" else []
            data = data[1:]
    return keys, b""


def press(view: View, key: str, metrics: int, layers: int, heads: int) -> View | None:
    """Where a key leads, among so many metrics, layers and heads; None to quit."""
    match key:
        case "q":
            return None
        case "?":
            return replace(view, page="grid" if view.page == "help" else "help")
        case "d" | "enter":
            return replace(view, page="head" if view.page == "grid" else "grid")
        case "m":
            return replace(view, metric=(view.metric + 1) % max(metrics, 1))
        case "M":
            return replace(view, metric=(view.metric - 1) % max(metrics, 1))
    down, right = _MOVES.get(key, (0, 0))
    layer = min(max(view.layer + down, 0), max(layers - 1, 0))
    return replace(view, layer=layer, head=min(max(view.head + right, 0), max(heads - 1, 0)))
