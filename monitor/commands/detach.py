"""`attnwatch detach`: leave a process as it was before `attnwatch attach`."""

from __future__ import annotations

import argparse
from typing import Any

from attnwatch.monitor.commands.attach import add_timeout
from attnwatch.monitor.sample import UsageError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "detach",
        help="leave a process as it was before attach",
        description="Takes the hooks off between two steps, ends the recording and writes the report.",
    )
    parser.add_argument("pid", type=int, metavar="PID")
    add_timeout(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from attnwatch.monitor.attach import wire
    from attnwatch.monitor.attach.asking import ask
    from attnwatch.monitor.attach.process import target

    target(options.pid)
    peer = wire.connect(options.pid)
    if peer is None:
        raise UsageError(f"expected a process that attnwatch was attached to, found nothing of it in {options.pid}")
    with peer:
        for line in ask(peer, "detach", options.timeout)["told"]:
            print(line)
    return 0
