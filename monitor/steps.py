"""Which checkpoints the paths of a command line stand for, and at which step each was saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from attnwatch.monitor.sample import UsageError

_STEP = re.compile(r"(?:step|checkpoint|ckpt|iter(?:ation)?|epoch)[-_=]?(\d{1,15})", re.IGNORECASE)
_LAST = re.compile(r"(?:^|[-_.=])(\d{1,15})$")


class Step(NamedTuple):
    """One checkpoint. source: where its number is from, "name" or "order" (then it is a place in a list)."""

    number: int
    path: Path
    source: str

    @property
    def name(self) -> str:
        return self.path.name


def find_steps(paths: Sequence[Path], is_checkpoint: Callable[[Path], bool]) -> list[Step]:
    """The checkpoints in order of step. A pattern stands for what it matches, a directory for those right in it.

    Steps are from names if every name has one and they differ; else the checkpoints are counted in the order given.
    Raises UsageError for a pattern that matches nothing, and when one path is neither a checkpoint nor holds any.
    """
    found: list[Path] = []
    for path in paths:
        matches = _matches(path)
        whole = [match for match in matches if is_checkpoint(match)]
        inside = [
            entry
            for match in matches
            if match not in whole and match.is_dir()
            for entry in _ordered(match.iterdir())
            if is_checkpoint(entry)
        ]
        found += [*whole, *inside] or [path]  # the reader says what is wrong with it
    numbers = [_number(path) for path in found]
    known = [number for number in numbers if number is not None]
    if len(set(known)) == len(found):
        return sorted((Step(n, path, "name") for n, path in zip(known, found, strict=True)), key=lambda x: x.number)
    return [Step(at, path, "order") for at, path in enumerate(found)]


def _matches(path: Path) -> list[Path]:
    if path.exists() or not has_magic(str(path)):
        return [path]
    matches = _ordered(Path(match) for match in glob(str(path)))
    if not matches:
        raise UsageError(f"expected checkpoints at {str(path)!r}, found nothing that matches; check the pattern")
    return matches


def _ordered(paths: Iterable[Path]) -> list[Path]:
    """Step 2 before step 10."""
    return sorted(paths, key=lambda path: [(text, int(x or 0)) for text, x in re.findall(r"(\D*)(\d*)", path.name)])


def _number(path: Path) -> int | None:
    """`checkpoint-100`, `step_200.pt`, `epoch=3-step=1200.ckpt`, `global_step300`: the last one that is named."""
    for part in (path, path.parent) if path.suffix else (path,):
        stem = part.stem if part is path and path.is_file() else part.name
        named = _STEP.findall(stem)
        if named:
            return int(named[-1])
        last = _LAST.search(stem)
        if last:
            return int(last[1])
    return None
