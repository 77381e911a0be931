"""What `watch` was asked for: checked before anything is opened, and kept in run.json."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import attnwatch
from attnwatch.monitor.alerts import SEVERITIES
from attnwatch.monitor.outputs.prometheus import Prometheus
from attnwatch.monitor.rules import Rule, load_rules
from attnwatch.monitor.run import as_path
from attnwatch.monitor.sample import Metric, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SPECTRUM_EVERY = 5


@dataclass(frozen=True)
class Options:
    """The arguments of `watch` as plain data; `rules` and `optimizer` say what was given. Raises UsageError."""

    every: int
    spectrum_every: int
    rows: int | None
    sequences: int
    rules: str
    prometheus: Prometheus | None
    stop_on: str | None
    optimizer: str | None
    compiled: str
    context: int | None
    budget: float | None = None
    merge: str = "ranks"
    every_row: bool = False
    spectrum_layers: int | None = None

    def __post_init__(self) -> None:
        if type(self.every_row) is not bool:
            raise UsageError(f"expected every_row to be True or False, found {self.every_row!r}")
        if self.merge not in ("ranks", "none"):
            raise UsageError(f'expected merge to be "ranks" or "none", found {self.merge!r}')
        if self.compiled not in ("eager", "graph"):
            raise UsageError(f'expected compiled to be "eager" or "graph", found {self.compiled!r}')
        for name in ("every", "spectrum_every", "rows", "sequences", "spectrum_layers"):
            value, may_be_none = getattr(self, name), name in ("rows", "spectrum_layers")
            if not (may_be_none and value is None) and (type(value) is not int or value < 1):
                raise UsageError(f"expected {name} to be a whole number of at least 1, found {value!r}")
        if self.budget is not None and not (type(self.budget) in (int, float) and 0 < self.budget < 1):
            raise UsageError(
                f"expected budget to be a share of the training time between 0 and 1, 0.01 say, found {self.budget!r}"
            )
        if self.context is not None and (type(self.context) is not int or self.context < 2):
            raise UsageError(f"expected context to be a whole number of at least 2 keys, found {self.context!r}")
        if self.stop_on is not None and self.stop_on not in SEVERITIES:
            raise UsageError(f"expected stop_on to be one of {', '.join(SEVERITIES)}, found {self.stop_on!r}")


def choose_rules(given: str | os.PathLike[str] | Sequence[Rule] | None) -> tuple[tuple[Rule, ...], str]:
    """The rules, and what to call them in run.json. Raises UsageError."""
    if given is None:
        return load_rules(), "default"
    if isinstance(given, str | os.PathLike):
        return load_rules(given), str(given)
    if not isinstance(given, list | tuple) or not all(isinstance(rule, Rule) for rule in given):
        raise UsageError(f"expected rules to be a TOML file or a list of attnwatch.Rule, found {repr(given)[:60]}")
    return tuple(given), f"{len(given)} given"


def check_outputs(given: object) -> None:
    """Raises UsageError for what is no list of outputs."""

    def is_output(x: object) -> bool:
        return not isinstance(x, type) and all(callable(getattr(x, name, None)) for name in ("write", "close"))

    if not isinstance(given, list | tuple) or not all(map(is_output, given)):
        raise UsageError(
            f"expected outputs to be a list of objects with write(update) and close(), found {repr(given)[:60]}"
        )


def absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except OSError as error:  # the working directory is gone
        raise UsageError(f"expected a directory to record in, found {error.strerror}; pass run= a full path") from None


def run_directory(given: str | os.PathLike[str] | None) -> Path:
    """Where to record: by default `runs/<date>-<time>`, with a number behind it if that is taken.

    Absolute, so that a trainer may change its directory. Raises UsageError for what is no path.
    """
    if given is not None:
        return absolute(as_path(given, "run"))
    stem = absolute(Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S"))
    return next(path for n in range(1, 1000) if not (path := stem if n == 1 else Path(f"{stem}-{n}")).exists())


def header(
    options: DataclassInstance,
    metrics: Sequence[Metric],
    rules: Sequence[Rule],
    versions: Mapping[str, str],
    **facts: Any,
) -> dict[str, Any]:
    """What run.json says of a run. versions: of libraries, beside Python and numpy. facts: of model and code."""
    return {
        "attnwatch": attnwatch.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions, "numpy": np.__version__},
        **facts,
        "options": asdict(options),
        "metrics": [asdict(metric) for metric in metrics],
        "rules": [asdict(rule) for rule in rules],
    }
