"""`attnwatch run`: an unmodified script, watched."""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import asdict
from typing import Any

from attnwatch.monitor.sample import UsageError


def add(commands: Any) -> None:
    from attnwatch.monitor.attach.wanted import add_options

    parser = commands.add_parser(
        "run",
        allow_abbrev=False,  # the script may have a --r of its own
        help="start a training script watched, without a change to it",
        description="Starts `python SCRIPT ARGUMENTS...` in the place of this process and watches the models with "
        "attention that its optimizers train, from the second step on. Exit code, signals, sys.argv and __main__ are "
        "the script's own.",
    )
    add_options(parser)
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(  # one list: the script may have a -- of its own
        "script", metavar="SCRIPT", nargs=argparse.PARSER, help="the script, and its own arguments"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from attnwatch.monitor.attach.launched import environment, say
    from attnwatch.monitor.attach.wanted import wanted

    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError("expected a Python that reads its environment, found -E, -I or -S; leave that out")
    asked = asdict(wanted(options))
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank == "0" and size != "1":
        say(f"rank 0 of {size} is watched: its share of the batch")
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    words = options.script[1:] if options.script[0] == "--" else options.script
    before = ["-m"] if options.is_module else ["--"] if words[0].startswith("-") else []
    python = [sys.executable, *_flags_of_python(flags), *before]
    sys.stdout.flush()
    sys.stderr.flush()
    command = [*python, *words]
    os.execve(sys.executable, command, environment(asked) if rank == "0" else dict(os.environ))


def _flags_of_python(before: list[str]) -> list[str]:
    """Those of the interpreter that runs this; behind them stands `-m attnwatch` or the path of the command.

    `-m` may stand in one word with flags (`-um attnwatch`) and with the name (`-mattnwatch`).
    """
    is_joined = before[-1].startswith("-")
    flags, word = (before[:-1], before[-1]) if is_joined else (before[:-2], "".join(before[-2:-1]))
    module = re.fullmatch("-([A-Za-z]*)m(attnwatch)?", word)
    if module is None:
        return before[:-1]
    return [*flags, f"-{module[1]}"] if module[1] else flags
