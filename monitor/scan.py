"""The spectra of saved checkpoints, layer by layer in bounded memory: no model code, no data, nothing run.

A scan is recorded as a run whose samples are checkpoints. Finished layers are kept in `scan.jsonl` beside it, by what
they were made of: a scan that was stopped, or is given more checkpoints later, goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import attnwatch
from attnwatch.hooks.checkpoints import Checkpoint, open_checkpoint
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.placement import Placed, Unplaced, place
from attnwatch.hooks.spectrum import LAYER_INPUT, LAYER_WIDTH, SPECTRUM, spectrum
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.options import choose_rules, header
from attnwatch.monitor.rules import Engine, Rule, load_rules, of_file
from attnwatch.monitor.run import CHECKPOINTS
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, UsageError
from attnwatch.monitor.scan_record import Record
from attnwatch.monitor.steps import Step

WORKERS = 2
"""Layers at a time, each on one thread: small LAPACK problems are slower on several."""

CHUNK = 1 << 23
"""Numbers of a large W_q that are taken at a time: 32 MB of them."""

_OWN = (
    Metric("weights_nonfinite", "count", "Numbers of the head's W_q and W_k that are NaN or infinite.", "sum"),
    Metric("wq_norm", "1", "Frobenius norm of the head's W_q.", "last"),
    Metric("wk_norm", "1", "Frobenius norm of the W_k of the head's key head.", "last"),
    Metric("q_gain_max", "1", "Largest size of a gain of the query norm.", "last"),
    Metric("k_gain_max", "1", "Largest size of a gain of the key norm.", "last"),
)
ALL_METRICS = (*(Metric(*metric) for metric in METRICS), *_OWN)
_NAMES = [metric.name for metric in ALL_METRICS]
_MEASURED = [*(metric.name for metric in SPECTRUM), "logit_bound", *(metric.name for metric in _OWN)]
_OF_LAYER = [at for at, name in enumerate(_MEASURED) if name.startswith("layer_")]
_ROWS = [_NAMES.index(name) for name in _MEASURED]

Progress = Callable[[str, int, int], object]
"""Told after every layer: the checkpoint, layers done, layers in all of them."""


@dataclass(frozen=True)
class Options:
    """What a scan was asked for; kept in run.json."""

    checkpoints: int
    heads: int | None
    kv_heads: int | None
    layout: str | None
    rules: str


class Scanned(NamedTuple):
    """One checkpoint's numbers."""

    step: Step
    sample: Sample
    coverage: tuple[Coverage, ...]


@dataclass(frozen=True)
class Scan:
    """What was found. checkpoints: in order of step. alerts: of all rules, oldest first. problems: the checkpoints that
    were left out, and why."""

    checkpoints: tuple[Scanned, ...]
    alerts: tuple[Alert, ...]
    problems: tuple[Problem, ...] = ()


def scan(
    steps: Sequence[Step],
    *,
    out: Path | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    layout: str | None = None,
    rules: Path | None = None,
    progress: Progress | None = None,
) -> Scan:
    """Scan checkpoints in order of step; with `out`, record them as a run there.

    heads, kv_heads, layout (of `placement.LAYOUTS`): what the checkpoints do not tell. rules: a TOML file in place of
    the default ones. A checkpoint that is unreadable, holds nothing that is attention, or none that can be placed, is
    left out. Raises UsageError where all are; and for an `out` that holds anything but an earlier scan.
    """
    chosen, source = choose_rules(rules)
    chosen = (*chosen, *load_rules(Path(__file__).with_name("scan_rules.toml")))
    options = Options(len(steps), heads, kv_heads, layout, source)
    with of_file(rules):
        engine = Engine(chosen, ALL_METRICS)
    opened: list[_Opened] = []
    problems: list[Problem] = []
    for step in steps:
        with _left_out(step, problems):
            opened.append(_open(step, options))
    if not opened:
        raise UsageError(problems[0].text)
    record = None if out is None else Record(out, _header(opened, options, chosen), len(_MEASURED))
    total = sum(len(each.placed) for each in opened)
    found: list[Scanned] = []
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(each.step.name, done, total)

    try:
        for each in opened:
            with _left_out(each.step, problems):
                scanned = _measure(each, record, advance)
                changed = engine.on_sample(scanned.sample, scanned.coverage, {})
                if record is not None:
                    record.add(scanned.sample, scanned.coverage, changed)
                found.append(scanned)
    finally:
        if record is not None:
            record.close(problems, ended=len(found) + len(problems) == len(steps))
    if not found:
        raise UsageError(problems[0].text)
    return Scan(tuple(found), engine.alerts, tuple(problems))


@contextmanager
def _left_out(step: Step, problems: list[Problem]) -> Iterator[None]:
    """A checkpoint that cannot be scanned is named, and the others go on."""
    try:
        yield
    except UsageError as error:
        problems.append(Problem(step.number, step.name, str(error)))


class _Opened(NamedTuple):
    step: Step
    checkpoint: Checkpoint
    placed: list[Placed]
    unplaced: list[Unplaced]


def _open(step: Step, options: Options) -> _Opened:
    try:
        checkpoint = open_checkpoint(step.path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(
            f"expected a checkpoint at {str(step.path)!r}, found: {error.strerror}; check who may read it"
        ) from None
    found = place(checkpoint.tensors, checkpoint.config, options.heads, options.kv_heads, options.layout)
    placed = [each for each in found if isinstance(each, Placed)]
    unplaced = [each for each in found if isinstance(each, Unplaced)]
    if not found:
        names = ", ".join(list(checkpoint.tensors)[:3])
        raise UsageError(
            f"expected query and key weights in {str(step.path)!r}, found none among {len(checkpoint.tensors)} tensors "
            f"({names or 'none'}); give a checkpoint of a transformer"
        )
    if not placed:
        first, more = unplaced[0], f" (and {len(unplaced) - 1} more)" if len(unplaced) > 1 else ""
        raise UsageError(
            f"expected weights that can be placed in {str(step.path)!r}, found {first.layer}{more}: {first.note}"
        )
    return _Opened(step, checkpoint, placed, unplaced)


def _header(opened: Sequence[_Opened], options: Options, rules: Sequence[Rule]) -> dict[str, Any]:
    first = opened[0]
    path = first.checkpoint.path.resolve()
    named = path if len(opened) == 1 else path.parent  # several are of one run, which has the name above theirs
    names = {name for layer in first.placed for name in (layer.q.name, layer.k.name)}
    facts = {
        "source": CHECKPOINTS,
        "model": str(first.checkpoint.config.get("model_type") or named.name),
        "parameters": sum(int(np.prod(first.checkpoint.tensors[name].shape)) for name in names),
        "checkpoints": [
            {"step": each.step.number, "path": str(each.step.path), "step_from": each.step.source} for each in opened
        ],
    }
    versions = {"torch": torch.__version__}
    return header(options, ALL_METRICS, rules, versions, **facts)


# --- one checkpoint ---------------------------------------------------------------------------------------------------


def _measure(opened: _Opened, record: Record | None, advance: Callable[[], None]) -> Scanned:
    """Every placed layer, `WORKERS` of them at a time; those in the journal are taken from there. Raises UsageError."""
    started = time.perf_counter()
    step, checkpoint, placed, _ = opened
    try:
        files = [(str(file.resolve()), file.stat()) for file in checkpoint.files]
    except OSError as error:  # a trainer that keeps the newest ones has removed it meanwhile
        raise UsageError(
            f"expected {str(step.path)!r} to stay while it is scanned, found: {error.strerror}; scan what is left"
        ) from None
    mark = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    disk = threading.Lock()

    def measure(layer: Placed) -> NDArray[np.float32]:
        key = _key(mark, layer)
        known = None if record is None else record.known(key)
        if known is None:
            with disk:
                tensors = checkpoint.read(layer.names)
            known = layer_values(layer, tensors)
            if record is not None:
                record.keep(key, layer.layer, known)
        return known

    values = np.full((len(ALL_METRICS), len(placed), max(x.heads for x in placed)), np.nan, np.float32)
    workers = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for at, found in enumerate(workers.map(measure, placed)):
            values[_ROWS, at, : found.shape[1]] = found
            advance()
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        workers.shutdown(cancel_futures=True)
    names = tuple(layer.layer for layer in placed)
    modified = max(stat.st_mtime for _, stat in files)
    seconds = time.perf_counter() - started
    return Scanned(step, Sample(step.number, modified, tuple(_NAMES), names, values, seconds), _coverage(opened))


def layer_values(layer: Placed, tensors: dict[str, Tensor]) -> NDArray[np.float32]:
    """`[metrics measured, heads]` of one layer from its tensors; of a large layer some heads at a time."""
    w_q, w_k = layer.q.of(tensors), layer.k.of(tensors)
    group = layer.heads // layer.kv_heads
    is_large = layer.heads * layer.head_dim > LAYER_WIDTH or max(w_q.shape[2], w_k.shape[2]) > LAYER_INPUT
    most = max(1, CHUNK // (group * layer.head_dim * w_q.shape[2])) if is_large else layer.kv_heads
    gains = None if layer.gains is None else [gain.of(tensors, layer.head_dim) for gain in layer.gains]
    parts = []
    with torch.no_grad():
        for first in range(0, layer.kv_heads, most):
            heads = slice(first * group, (first + most) * group), slice(first, first + most)
            q, k = (weight[some].float() for weight, some in zip((w_q, w_k), heads, strict=True))
            folded = gains and [g[some] if len(g) > 1 else g for g, some in zip(gains, heads, strict=True)]
            parts.append(_head_values(q, k, folded))
    values = torch.cat(parts, 1)
    if is_large:  # then the values of the whole layer were those of a part of its heads
        values[_OF_LAYER] = torch.nan
    if gains is not None:
        values[len(SPECTRUM)] = _bound(layer, *gains)
    return values.numpy()


def _head_values(w_q: Tensor, w_k: Tensor, gains: list[Tensor] | None) -> Tensor:
    """float32 `[metrics measured, heads]`, the bound still unknown, of `w_q [H, d, in_q]` and `w_k [Hk, d, in_k]`."""
    group = len(w_q) // len(w_k)
    unknown = torch.full((len(w_q),), torch.nan)
    norm_q, norm_k = (torch.linalg.vector_norm(w, dim=(1, 2)) for w in (w_q, w_k))
    bad_q, bad_k = _nonfinite(w_q, norm_q), _nonfinite(w_k, norm_k)
    peaks = [unknown, unknown]
    if gains is not None:
        w_q, w_k = w_q * gains[0], w_k * gains[1]
        peaks = [
            gain.abs().amax((1, 2)).expand(n).repeat_interleave(times)
            for gain, n, times in zip(gains, (len(w_q), len(w_k)), (1, group), strict=True)
        ]
    shared = min(w_q.shape[1], w_k.shape[1])  # of latent attention's queries the part that keys have too
    spectra = spectrum(w_q[:, :shared], w_k[:, :shared]).float()
    own = [bad_q + bad_k.repeat_interleave(group), norm_q, norm_k.repeat_interleave(group), *peaks]
    return torch.cat([spectra, torch.stack([unknown, *(row.float() for row in own)])])


def _nonfinite(w: Tensor, norms: Tensor) -> Tensor:
    """`[H]`: how many numbers of each head are not finite. To look at all of them takes longer than their norm."""
    return torch.zeros(len(w)) if norms.isfinite().all() else w.isfinite().logical_not_().sum((1, 2))


def _bound(layer: Placed, gain_q: Tensor, gain_k: Tensor) -> Tensor:
    """`logit_bound` `[H]`: a normalised vector is as long as the root of its size, times the largest gain."""
    d, group = layer.head_dim, layer.heads // layer.kv_heads
    if layer.qk_norm == "across heads":
        size, peaks = d * (layer.heads * layer.kv_heads) ** 0.5, [gain.abs().amax() for gain in (gain_q, gain_k)]
    else:
        size, peaks = float(d), [gain.abs().amax((1, 2)) for gain in (gain_q, gain_k)]
        peaks[1] = peaks[1].repeat_interleave(group if len(peaks[1]) > 1 else 1)
    bound: Tensor = layer.scale * size * peaks[0] * peaks[1]
    return bound


def _coverage(opened: _Opened) -> tuple[Coverage, ...]:
    """A placed layer is stored as verified: of the three states only that one keeps a spectrum, here and in a replay.
    Its note and the run's source say that nothing was proved, and whoever shows it calls it placed."""
    placed = [
        Coverage(x.layer, "verified", x.heads, x.kv_heads, x.head_dim, x.qk_norm, x.note, x.dtype)
        for x in opened.placed
    ]
    return (*placed, *(Coverage(x.layer, "uncovered", note=x.note) for x in opened.unplaced))


def _key(mark: object, layer: Placed) -> str:
    """What a layer's values were made of: the files, the place of its weights, and this version of the reckoning."""
    parts = [(part.name, part.layout.label, part.transposed) for part in (layer.q, layer.k)]
    sizes = (layer.heads, layer.kv_heads, layer.head_dim, layer.scale, layer.gains)
    text = json.dumps([attnwatch.__version__, _MEASURED, mark, parts, sizes])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
