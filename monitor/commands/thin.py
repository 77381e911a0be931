"""`attnwatch thin`: a long run in less room."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "thin",
        help="copy a long run into less room, with envelopes of what is left out",
        description="Copies a run: of each group of samples one stays, with the least and the largest of every number "
        "in the group; every sample stays around alerts and at both ends. The run itself is left as it is.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="NEW", help="a new directory")
    parser.add_argument("--every", type=_count, default=10, metavar="N", help="samples in a group (default: 10)")
    parser.add_argument(
        "--around", type=_count, default=100, metavar="N",
        help="samples that stay on both sides of an alert's beginning, firing and end (default: 100)",
    )  # fmt: skip
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from attnwatch.monitor.run import open_run
    from attnwatch.monitor.thin import thin

    done = thin(open_run(options.run), options.output, options.every, options.around)
    print(f"{options.output}: {done.kept} of {done.samples} samples")
    return 0


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)
