"""The command line. Exit codes: 0; 1, an alert that `--fail-on` asks for; 2, wrong use or unreadable input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from attnwatch.monitor.sample import UsageError

COMMANDS = ("demo", "run", "attach", "detach", "report", "live", "replay", "scan", "export", "thin", "rules")
"""In the order of the help; each is a module of monitor/commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails once more
        return 0
    except (UsageError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"expected to read or write {error.filename!r}, found {error.strerror}; check the path and its owner"
        print(f"attnwatch: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except Exception as error:  # never the exit code of an alert
        text = " ".join(str(error).split())[:300]
        print(
            f"attnwatch: expected a run as attnwatch writes it, found {type(error).__name__}: {text}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("attnwatch: stopped; what was recorded is kept", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Wrong use is one line, as every other error of ours."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"attnwatch: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="attnwatch",
        description="Watches the attention of a transformer while it trains. In a trainer: attnwatch.watch(model).",
        epilog="Exit codes: 0; 1, an alert that --fail-on asks for fired; 2, wrong use or unreadable input.",
    )
    parser.add_argument("--version", action="version", version=f"attnwatch {version('attnwatch')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"attnwatch.monitor.commands.{name}").add(commands)
    return parser
