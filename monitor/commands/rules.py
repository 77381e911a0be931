"""`attnwatch rules`: the default rules, to edit; and what a Prometheus server and Grafana need for them."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnwatch.monitor.outputs.alerting import prometheus_rules
from attnwatch.monitor.outputs.dashboard import dashboard
from attnwatch.monitor.rules import Engine, Rule, load_rules, of_file
from attnwatch.monitor.sample import Metric, UsageError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "rules",
        help="the default rules as TOML, to edit; alerting rules for Prometheus; a dashboard for Grafana",
        description="Prints the default rules; edit a copy and pass it as attnwatch.watch(model, rules=FILE).",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--prometheus", nargs="?", type=Path, const=True, metavar="RULES",
        help="alerting rules for Prometheus instead, of the default rules or of such a TOML file",
    )  # fmt: skip
    kind.add_argument("--grafana", action="store_true", help="a Grafana dashboard as JSON instead")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write to a new file instead")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    if options.grafana:
        text = json.dumps(dashboard(), indent=1) + "\n"
    elif options.prometheus:
        text = prometheus_rules(load_rules() if options.prometheus is True else _own(options.prometheus))
    else:
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


def _own(path: Path) -> tuple[Rule, ...]:
    """Rules that `watch` would take as well. Raises UsageError."""
    from attnwatch.hooks.layers import METRICS  # loads torch, which the other choices do without

    rules = load_rules(path)
    with of_file(path):
        Engine(rules, [Metric(*metric) for metric in METRICS])
    return rules
