"""What watching costs beside what other open monitors cost: the same small decoder, steps in turn. One table.

The peers are installed from the package index, without their dependencies, each into a directory that is gone
afterwards, and run as their documentation says, each in a process of its own; one that cannot be installed or run says
so in its row. What they measure differs: the table says what. Above its line all give the entropy of every head at
every step. Batches come from torch's global random numbers, as shuffled data does: a monitor that draws from these, or
skips steps, parts the losses from those of the unwatched model. The probe of lingua is missing: it is no package.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from benchmarks.peers.model import LAYERS, WIDTH
from benchmarks.peers.timing import costs, measure
from benchmarks.peers.watchers import OTHERS, SAME_WORK
from rich.console import Console
from rich.table import Table

FULL, QUICK = {256: 60, 1024: 20}, {256: 20}
"""Steps by length."""


def row(name: str, steps: dict[int, int]) -> list[str]:
    what = (SAME_WORK | OTHERS)[name].what
    try:
        found = costs(name, steps)
    except RuntimeError as error:
        return [name, *("-" for _ in steps), "-", str(error)[:100]]
    parted = [cost.parted for cost in found if cost.parted is not None]
    losses = f"other, step {min(parted)} on" if parted else "the same"
    return [name, *(f"{cost.ratio:.2f}" for cost in found), losses, what]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one length, fewer steps")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child is not None:
        name, length, steps, packages = options.child
        sys.path.append(packages)  # last: nothing of it takes the place of what is installed
        print(json.dumps(measure((SAME_WORK | OTHERS)[name], int(length), int(steps))))
        return
    steps = QUICK if options.quick else FULL
    table = Table(title=f"CPU time over unwatched, {LAYERS} layers of {WIDTH}, batches of 4, torch {torch.__version__}")
    for column in ("", *(f"T = {length}" for length in steps), "losses", "what it measures"):
        table.add_column(column, justify="right" if column.startswith("T") else "left")
    names = [*SAME_WORK, *OTHERS]
    for name in names:
        table.add_row(*(found := row(name, steps)), end_section=name == names[len(SAME_WORK) - 1])
        print(*found, sep=" | ", file=sys.stderr, flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
