"""`attnwatch rules`: the default rules, to edit."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnwatch.monitor.sample import UsageError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "rules",
        help="the default rules as TOML, to edit",
        description="Prints the default rules; edit a copy and pass it as attnwatch.watch(model, rules=FILE).",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a new file instead")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    text = (files("attnwatch.monitor") / "default_rules.toml").read_text(encoding="utf-8")
    if options.out is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(options.out, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"expected a new file, found {options.out} there already; name another or remove it") from None
    except OSError as error:
        raise UsageError(
            f"expected a place to write the rules, found {str(options.out)!r} ({error.strerror}); name another file"
        ) from None
    print(options.out)
    return 0
