"""`attnwatch scan`: spectra of saved weights, with no model code and no data."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnwatch.monitor.commands.runs import printer
from attnwatch.monitor.leads import warnings

if TYPE_CHECKING:
    from rich.console import Console

    from attnwatch.monitor.scan import Progress, Scan, Scanned

LOW_RANK = 0.5
"""`qk_rank_ratio` below which the default rules call a head low-rank."""
MOST_NAMED = 8
LIMITS = (
    "could not tell from weights alone whether attention is healthy: entropy, logits and sinks need a forward "
    "(attnwatch.watch)"
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "scan",
        help="spectra of W_q^T W_k of saved checkpoints; no model code, no data",
        description="Reads the query and key weights of checkpoints (safetensors, torch.save, distributed checkpoints, "
        "Hugging Face directories) layer by layer: ranks, spectral energy, norms, and how they changed. Says what it "
        "cannot place. One that cannot be read is left out and named, with exit code 2 at the end. With --out it "
        "leaves a run and its report, and goes on there where it was stopped.",
    )
    parser.add_argument(
        "checkpoints", nargs="+", type=Path, metavar="CHECKPOINT",
        help="a file, a directory, a directory of them, or a pattern in quotes; steps are told from names",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", type=Path, metavar="RUN", help="record a run here; an earlier scan is gone on with"
    )
    parser.add_argument("--heads", type=_count, metavar="N", help="query heads of a layer, where no config.json says")
    parser.add_argument("--kv-heads", type=_count, metavar="N", help="key heads, where fewer and not known")
    parser.add_argument(
        "--layout", choices=("blocks", "groups", "features"), metavar="NAME",
        help="of a weight that holds q, k and v: blocks (all queries, all keys, all values), groups (by key head: its "
        "queries, its key, its value) or features (by head and feature: query, key, value)",
    )  # fmt: skip
    parser.add_argument("--rules", type=Path, metavar="FILE", help="rules in place of the default ones")
    parser.add_argument("--json", action="store_true", help="print JSON: every head of every checkpoint")
    parser.set_defaults(command=run)


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return number


def run(options: argparse.Namespace) -> int:
    from attnwatch.hooks.checkpoints import is_checkpoint  # loads torch
    from attnwatch.monitor.scan import scan
    from attnwatch.monitor.steps import find_steps

    steps = find_steps(options.checkpoints, is_checkpoint)
    with _progress() as progress:
        found = scan(
            steps, out=options.out, heads=options.heads, kv_heads=options.kv_heads, layout=options.layout,
            rules=options.rules, progress=progress,
        )  # fmt: skip
    if options.json:
        print(json.dumps(as_data(found), indent=1, allow_nan=False))
    else:
        show(found, printer())
    if options.out is not None:
        page = _report(options.out)
        print(f"recorded in {options.out}; the report: {page}", file=sys.stderr if options.json else sys.stdout)
    for problem in found.problems:
        print(f"attnwatch: left out: {problem.text}", file=sys.stderr)
    return 2 if found.problems else 0


def _report(out: Path) -> Path:
    from attnwatch.monitor.run import open_run
    from attnwatch.reports.html import write_page_and_summary

    return write_page_and_summary([open_run(out)], out / "report.html")


@contextmanager
def _progress() -> Iterator[Progress]:
    """What to call after every layer: a bar on a terminal, until the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        bar = bars.add_task("layers", total=None)

        def tell(name: str, done: int, total: int) -> None:
            bars.update(bar, description=f"layers of {name}", completed=done, total=total)

        yield tell


# --- what it prints ---------------------------------------------------------------------------------------------------


def show(found: Scan, console: Console) -> None:
    """A table of the last checkpoint's layers with their past, then what stands out and what is not known."""
    from rich.table import Table

    from attnwatch.reports.glyphs import BLOCKS

    last = found.checkpoints[-1]
    several = len(found.checkpoints) > 1
    blocks = BLOCKS[console.options.ascii_only]
    table = Table(title=_title(found), title_justify="left", box=None, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    columns = ("heads", "rank", "lowest", "top 10", "sigma max", "|W_q|", "|W_k|")
    normed = bool(np.isfinite(last.sample["logit_bound"]).any())
    for name in (*columns, *(["gains", "logit bound"] if normed else []), *(["rank over steps"] if several else [])):
        table.add_column(name, justify="left" if name == "rank over steps" else "right")
    for at, layer in enumerate(last.sample.layers):
        table.add_row(layer, *_row(last, at, normed), *([_spark(found, layer, blocks)] if several else []))
    console.print(table)
    console.print(
        "rank, lowest: qk_rank_ratio, median and lowest of the heads (1: as random weights); top 10: median share of "
        "energy; sigma max, norms: largest head's, spectral",
        markup=False,
    )
    for line in _findings(found):
        console.print(line, markup=False)


def _title(found: Scan) -> str:
    last = found.checkpoints[-1]
    steps = [scanned.step for scanned in found.checkpoints]
    if len(steps) == 1:
        return f"{last.step.path}: {len(last.sample.layers)} layers"
    if steps[0].source == "name":
        return f"{len(steps)} checkpoints, step {steps[0].number} to {steps[-1].number}; the last, {last.step.path}:"
    order = f"steps are not in all names, so counted from {steps[0].number}, {steps[0].path}"
    return f"{len(steps)} checkpoints ({order}); the last, {steps[-1].number}, {last.step.path}:"


def _row(scanned: Scanned, at: int, normed: bool) -> list[str]:
    sample = scanned.sample

    def values(name: str) -> NDArray[np.float32]:
        row = sample[name][at]
        finite: NDArray[np.float32] = row[np.isfinite(row)]
        return finite

    heads = next(x for x in scanned.coverage if x.name == sample.layers[at])
    counted = f"{heads.heads}" if heads.heads == heads.kv_heads else f"{heads.heads}/{heads.kv_heads}"
    cells = [
        counted,
        _number(values("qk_rank_ratio"), np.median), _number(values("qk_rank_ratio"), np.min),
        _number(values("qk_energy_top10"), np.median),
        _number(values("qk_sigma_max"), np.max), _number(values("wq_sigma_max"), np.max),
        _number(values("wk_sigma_max"), np.max),
    ]  # fmt: skip
    if normed:
        gains = [_number(values(name), np.max) for name in ("q_gain_max", "k_gain_max")]
        cells += [" ".join(gains), _number(values("logit_bound"), np.max)]
    return cells


def _number(values: NDArray[np.float32], pick: Any) -> str:
    return f"{float(pick(values)):.3g}" if values.size else "-"


def _spark(found: Scan, layer: str, blocks: str) -> str:
    """Median rank of a layer's heads from the first checkpoint to the last, at most 24 of them."""
    past = []
    for scanned in found.checkpoints:
        ratios = scanned.sample["qk_rank_ratio"]
        row = ratios[scanned.sample.layers.index(layer)] if layer in scanned.sample.layers else ratios[:0]
        past.append(float(np.median(row[np.isfinite(row)])) if np.isfinite(row).any() else math.nan)
    shown = [past[round(i)] for i in np.linspace(0, len(past) - 1, min(len(past), 24))]
    marks = "".join(" " if math.isnan(x) else blocks[min(max(int(x * 7.5), 0), 7)] for x in shown)
    first, last = ("-" if math.isnan(x) else f"{x:.2f}" for x in (past[0], past[-1]))
    return f"{first} {marks} {last}"


def _findings(found: Scan) -> Iterator[str]:
    last = found.checkpoints[-1]
    normed = {layer.name for layer in last.coverage if layer.qk_norm}
    ratio = last.sample["qk_rank_ratio"]
    low = [
        (float(ratio[row, head]), f"{last.sample.layers[row]}/{head}")
        for row, head in np.argwhere(ratio < LOW_RANK)
        if last.sample.layers[row] not in normed
    ]
    if low:
        named = ", ".join(f"{name} ({value:.2f})" for value, name in sorted(low)[:MOST_NAMED])
        more = f" and {len(low) - MOST_NAMED} more" if len(low) > MOST_NAMED else ""
        yield (
            f"low-rank heads: {len(low)} of {int(np.isfinite(ratio).sum())}: {named}{more}; whether they are sparse "
            "too, as in a collapse, cannot be told from weights"
        )
    if normed:
        yield f"QK-norm in {len(normed)} layers: spectral concentration is healthy there"
    for alert in found.alerts:
        if alert.fired_step is not None:
            ended = "" if alert.resolved_step is None else f" (until step {alert.resolved_step})"
            yield f"step {alert.fired_step}{ended}: {alert.severity}: {alert.rule}: {alert.summary}"
    for rule, advice in {alert.rule: alert.advice for alert in warnings(found.alerts)}.items():
        yield f"what to do about {rule}: {advice}"
    unplaced: dict[str, list[str]] = {}
    for scanned in found.checkpoints:
        for layer in scanned.coverage:
            if layer.state == "uncovered" and layer.name not in unplaced.setdefault(layer.note, []):
                unplaced[layer.note].append(layer.name)
    for note, names in unplaced.items():
        yield f"not placed: {_named(names)}: {note}"
    newest = {name: scanned.step.number for scanned in found.checkpoints for name in scanned.sample.layers}
    gone = {name: step for name, step in newest.items() if name not in last.sample.layers}
    if gone:
        until = max(gone.values())
        yield f"not in the last checkpoint, so not in the table: {_named(list(gone))}, last seen at step {until}"
    yield LIMITS


def _named(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"


def as_data(found: Scan) -> dict[str, Any]:
    """Every number of every head, as plain data; what is not finite is None."""
    return {
        "checkpoints": [
            {"step": x.step.number, "step_from": x.step.source, "path": str(x.step.path), "layers": _layers(x)}
            for x in found.checkpoints
        ],
        "alerts": [
            {"rule": a.rule, "severity": a.severity, "place": a.place, "step": a.fired_step, "summary": a.summary}
            for a in found.alerts
            if a.fired_step is not None
        ],
        "problems": [asdict(problem) for problem in found.problems],
        "limits": LIMITS,
    }


def _layers(scanned: Scanned) -> list[dict[str, Any]]:
    rows = dict(zip(scanned.sample.layers, scanned.sample.values.transpose(1, 0, 2), strict=True))
    return [
        {
            "name": layer.name, "placed": layer.state != "uncovered", "note": layer.note,
            "heads": layer.heads, "kv_heads": layer.kv_heads, "head_dim": layer.head_dim, "qk_norm": layer.qk_norm,
            "metrics": {} if layer.name not in rows else _plain(scanned.sample.metrics, rows[layer.name], layer.heads),
        }
        for layer in scanned.coverage
    ]  # fmt: skip


def _plain(metrics: Sequence[str], values: NDArray[np.float32], heads: int) -> dict[str, list[float | None]]:
    """Metrics that are known of any head."""
    return {
        name: [float(x) if math.isfinite(x) else None for x in row[:heads]]
        for name, row in zip(metrics, values, strict=True)
        if np.isfinite(row).any()
    }
