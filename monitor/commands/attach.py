"""`attnwatch attach`: watch a process that already trains."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any


def add(commands: Any) -> None:
    from attnwatch.monitor.attach.wanted import add_options

    parser = commands.add_parser(
        "attach",
        help="watch a process that already trains",
        description="Watches the models with attention that the process trains, between two of its steps; each is "
        "recorded in a run directory of its own. Works at once where the script called attnwatch.arm(), or with "
        "Python 3.14; else --unsafe has gdb do it.",
    )
    parser.add_argument("pid", type=int, metavar="PID")
    add_options(parser)
    parser.add_argument("--model", type=int, metavar="N", help="only the N-th of those found")
    parser.add_argument("--dry-run", action="store_true", help="say what is found, watch nothing")
    parser.add_argument("--unsafe", action="store_true", help="stop the process with gdb for about a second")
    add_timeout(parser)
    parser.set_defaults(command=run)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="seconds to wait for the process's next step (60)"
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and less than 1e6, found {text}")


def run(options: argparse.Namespace) -> int:
    from attnwatch.monitor.attach import wire
    from attnwatch.monitor.attach.asking import ask
    from attnwatch.monitor.attach.inject import inject
    from attnwatch.monitor.attach.process import target
    from attnwatch.monitor.attach.wanted import wanted

    asked = asdict(wanted(options))
    process = target(options.pid)
    peer = wire.connect(options.pid) or inject(process, options.timeout, options.unsafe)
    with peer:
        try:
            reply = ask(peer, "look" if options.dry_run else "attach", options.timeout, wanted=asked)
        except KeyboardInterrupt:
            print(f"attnwatch: should it be watched by now: attnwatch detach {options.pid}", file=sys.stderr)
            raise
    print(f"process {options.pid}: {reply['versions']}")
    for line in reply["found"]:
        print(f"  {line}")
    if options.dry_run:
        return 0
    for line in reply["told"]:
        print(line)
    print(
        f"training stood still for {reply['stopped']:.2f} s between two steps; to end: attnwatch detach {options.pid}"
    )
    return 0
