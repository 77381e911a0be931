"""`attnwatch export`: a run as CSV, JSON lines or Parquet."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from attnwatch.monitor.commands.runs import tell_unreadable
from attnwatch.monitor.sample import UsageError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="a run as CSV, JSON lines or Parquet",
        description="Writes tidy rows: step, layer, head and the metrics; what was not measured is empty (null). CSV "
        "and JSON go to the screen without -o, and with `-o -`. Also of a run that still goes on.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    kind = parser.add_mutually_exclusive_group(required=True)
    for name, text in (("csv", "CSV"), ("json", "JSON, an object a line"), ("parquet", "Parquet (needs pyarrow)")):
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=text)
    parser.add_argument(
        "--what", choices=("samples", "scalars", "alerts"), default="samples",
        help="samples (the default): every head of every sample; scalars: what steps passed; alerts",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="a new file")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from attnwatch.monitor.export import table, write_csv, write_json
    from attnwatch.monitor.run import open_run

    if options.output == Path("-"):
        options.output = None
    if options.kind == "parquet" and options.output is None:
        raise UsageError("expected a file for Parquet, found none; give -o FILE")
    if options.output is not None and options.output.exists():
        raise UsageError(f"expected a new file, found {str(options.output)!r} there already; name another or remove it")
    recorded = open_run(options.run)
    tell_unreadable(recorded)
    content = table(recorded, options.what)
    if options.output is None:
        (write_csv if options.kind == "csv" else write_json)(content, sys.stdout)
    else:
        _write_file(content, options.kind, options.output)
        print(options.output)
    return 0


def _write_file(content: Any, kind: str, output: Path) -> None:
    """Whole or not at all. Raises UsageError."""
    from attnwatch.monitor.export import write_csv, write_json, write_parquet

    scratch = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        if kind == "parquet":
            write_parquet(content, str(scratch))
        else:
            with open(scratch, "w", encoding="utf-8", newline="") as file:
                (write_csv if kind == "csv" else write_json)(content, file)
        os.replace(scratch, output)
    except ImportError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(
            f"expected a place to write, found {str(output)!r} ({error.strerror or error}); name another file"
        ) from None
    finally:
        if scratch.parent.is_dir():
            scratch.unlink(missing_ok=True)
