"""A copy of a long run that needs less room: groups of its quiet samples become one sample and an envelope.

    samples/     of each group the sample that measured most, the latest of these: a sample as it was recorded
    lowest/      a run of its own whose samples are the least of every number in the group, at that sample's step
    highest/     the same, the largest

Every sample stays that is near a moment at which an alert began, fired or resolved, and at both ends of the run.
Scalars and events are copied line by line. run.json says what was done ("thinned"), and so does a problem.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.records import ordinary
from attnwatch.monitor.run import EVENTS, HIGHEST, LOWEST, SAMPLES, SCALARS, THINNED, Run
from attnwatch.monitor.sample import Problem, Sample, UsageError
from attnwatch.monitor.store import RunWriter


class Thinned(NamedTuple):
    """Samples that the copy has, and that the run has."""

    kept: int
    samples: int


def thin(run: Run, path: Path, every: int, around: int) -> Thinned:
    """Copies a run to `path`, whole or not at all; the run itself stays as it is.

    every: samples in a group. around: samples that are kept on both sides of what happened.
    Raises UsageError for a run that is thinned already or lacks a file, a place that is taken and one that cannot be
    written.
    """
    if run.is_thinned:
        raise UsageError(f"expected a run with all its samples, found {str(run.path)!r} thinned already")
    if os.path.lexists(path):
        raise UsageError(f"expected a new directory, found {str(path)!r} there already; name another")
    for name in (SCALARS, EVENTS):
        _check_lines(run.path / name)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        done = _write(run, scratch, every, around)
        os.replace(scratch, path)
    except (OSError, UsageError) as error:
        found = error.__cause__ or error  # of the writer's errors, which name the scratch directory
        raise UsageError(
            f"expected room for the copy, found {str(path)!r} ({getattr(found, 'strerror', None) or found}); name "
            "another place"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return done


def kept(run: Run, around: int) -> NDArray[np.bool_]:
    """`[S]`: the samples that stay whatever the others do."""
    count = len(run.steps)
    stay = np.zeros(count, np.bool_)
    stay[:around] = stay[max(count - around, 0) :] = True
    for alert in run.alerts:
        began, fired, resolved = alert.pending_step, alert.fired_step, alert.resolved_step
        for first, last in ((began, began if fired is None else fired), (resolved, resolved)):
            if first is not None and last is not None:
                from_index, to_index = np.searchsorted(run.steps, (first, last))
                stay[max(from_index - around, 0) : to_index + around + 1] = True
    return stay


def _groups(run: Run, every: int, around: int) -> Iterator[list[Sample]]:
    """All samples in order, alone or in groups of the same layers and heads."""
    group: list[Sample] = []
    for stays, sample in zip(kept(run, around).tolist(), run.iter_samples(), strict=True):
        same = group and (sample.layers, sample.values.shape) == (group[0].layers, group[0].values.shape)
        if group and (stays or not same or len(group) == every):
            yield group
            group = []
        if stays:
            yield [sample]
        else:
            group.append(sample)
    if group:
        yield group


def _write(run: Run, path: Path, every: int, around: int) -> Thinned:
    count = len(run.steps)
    described = {name: value for name, value in run.header.items() if name not in ("format", "layouts")}
    described[THINNED] = {
        "every": every, "around": around, "samples": count, "seconds": float(np.nansum(run.seconds)),
    }  # fmt: skip
    left = 0
    with ExitStack() as stack:
        samples, lowest, highest = (
            stack.enter_context(closing(RunWriter(place, described))) for place in (path, path / LOWEST, path / HIGHEST)
        )
        for group in _groups(run, every, around):
            left += 1
            best = max(group, key=lambda sample: (np.count_nonzero(~np.isnan(sample.values)), sample.step))
            samples.sample(best)
            if len(group) > 1:
                values = np.stack([sample.values for sample in group])
                lowest.sample(replace(best, values=np.fmin.reduce(values)))
                highest.sample(replace(best, values=np.fmax.reduce(values)))
    for name in (SCALARS, EVENTS):
        _copy_lines(run.path / name, path / name)
    text = (
        f"thinned: {left} of {count} samples are kept, one of {every} except for {around} on both sides of alerts and "
        f"at both ends; {LOWEST}/ and {HIGHEST}/ hold the least and the largest of those that are not"
    )
    # Of samples that could not be read the copy has nothing left that would tell.
    said = [problem for problem in run.problems if problem.where.startswith(f"{SAMPLES}/")]
    said.append(Problem(int(run.steps[-1]) if count else 0, SAMPLES, text))
    with open(path / EVENTS, "ab") as events:
        events.writelines(json.dumps({"event": "problem", **asdict(problem)}).encode() + b"\n" for problem in said)
    return Thinned(left, count)


def _check_lines(source: Path) -> None:
    try:
        ordinary(source)
        with open(source, "rb"):
            pass
    except OSError as error:
        raise UsageError(
            f"expected {source.name} in the run {str(source.parent)!r}, found: {error.strerror}; restore it or make an "
            "empty one"
        ) from None


def _copy_lines(source: Path, target: Path) -> None:
    """The whole lines: what follows the last newline may still be growing."""
    with open(source, "rb") as lines, open(target, "wb") as copy:
        copy.writelines(line for line in lines if line.endswith(b"\n"))
