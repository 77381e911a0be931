"""`watch`: everything that is asked for is checked and opened here, before training goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from attnwatch.hooks import ranks, sites
from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.probe import Probe
from attnwatch.monitor.journal import Elsewhere, Journal, Output
from attnwatch.monitor.options import SPECTRUM_EVERY, Options, check_outputs, choose_rules, header, run_directory
from attnwatch.monitor.outputs.apart import apart
from attnwatch.monitor.outputs.log import LogOutput
from attnwatch.monitor.outputs.prometheus import Prometheus, prometheus_outputs, prometheus_settings
from attnwatch.monitor.revision import revision
from attnwatch.monitor.rules import Engine, Rule, of_file
from attnwatch.monitor.sample import Metric, UsageError
from attnwatch.monitor.session import Monitor
from attnwatch.monitor.store import RunWriter

UNMET = (
    "$WORLD_SIZE says that several processes train, and torch.distributed is not initialised: each records what it "
    "sees, in a run of its own; to merge them call init_process_group before watch()"
)


def watch(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    run: str | os.PathLike[str] | None = None,
    every: int = 20,
    spectrum_every: int | None = None,
    rows: int | None = 64,
    sequences: int = 4,
    rules: str | os.PathLike[str] | Sequence[Rule] | None = None,
    outputs: Sequence[Output] = (),
    prometheus: int | Prometheus | None = None,
    report: bool = True,
    adapters: Sequence[Any] = (),
    compiled: str = "eager",
    context: int | None = None,
    stop_on: str | None = None,
    budget: float | None = None,
    merge: str = "ranks",
    every_row: bool = False,
    spectrum_layers: int | None = None,
) -> Monitor:
    """Watch the attention of a model while it trains. Attach before the first step; training is not changed.

    optimizer: count steps by its step hook instead of by `monitor.step()`.
    run: directory to record in (new or empty); None: `runs/<date>-<time>`.
    every: the first step is sampled, then every `every`-th. spectrum_every: the weights are looked at in the first
        sample, then in every `spectrum_every`-th (None: every fifth); rules use the last known spectrum.
        spectrum_layers: of at most so many layers at a time, in turn (None: of all); of all in the first sample.
    rows, sequences: at most so many query rows of so many sequences of a batch are measured (rows=None: all rows).
    every_row: entropy, entropy_ratio and first_key_mass are those of every row, by one more call of the fused kernel in
        float32; `rows` then holds for the other numbers. Calls with masks, soft-caps or sinks stay sampled.
    rules: a TOML file or a list of `Rule`; None: the default rules (`attnwatch rules` prints them).
    outputs: more objects with `write(update)` and `close()`. prometheus: a port on 127.0.0.1, 0 picks one; or an
        `attnwatch.Prometheus` that says more. A port in use is a problem that is named, no error.
    report: write `report.html` and `summary.json` into the run at `close()`.
    adapters: objects that tell of your own attention layers by `match`, `weights` or `record` (hooks/adapters.py).
    compiled: how to see into torch.compile. "eager": sampled steps run eagerly (rounding too), the compiled graphs
        are kept and used between them. "graph": an operator stands in the graphs that inductor compiles from now on
        (what was compiled before, anywhere in the process, is compiled anew); every step runs compiled, with the same
        bits as unwatched. It sees fused attention in training. Attention that is not fused (by hand, flex_attention,
        on a CPU with dropout or a learned bias), `observe`, other backends and what runs eagerly stay unseen, and are
        named as problems.
    context: a longer context, in keys, that the model is meant for later: `forecast_sharpness` is measured for it.
    stop_on: "info", "warning" or "critical": `monitor.step` raises `TrainingStopped` when such an alert fires; on all
        ranks at one step, or on none: not with merge="none", and not any more once ranks have parted.
    budget: the share of training time that sampling may cost, 0.01 say: the interval is lengthened to keep it, and
        shortened again, never below `every`. What it is and what it costs is logged, recorded and exported.
    merge: of several processes (torch.distributed). "ranks": call `watch` and `step` on every rank; each measures what
        it holds, rank 0 records them as one. "none": each records for itself in `run/rank00000`, `run/rank00001`, ...

    Raises UsageError, one line, for a model without attention, a wrong option or rule, a run
    directory that cannot be written or holds a run. After that nothing but `TrainingStopped` is ever raised.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module to watch, found {type(model).__name__}")
    several = ranks.several()
    merges = several and merge == "ranks"  # then the first and the last stage of a pipeline may hold none
    if not adapters and not merges and not sites.may_hold_attention(model):
        raise UsageError(
            f"expected a model with attention, found none in {type(model).__name__} (no module or forward code names "
            "it); call attnwatch.observe(module, q, k) in the forward of an attention that has no softmax"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected optimizer to be a torch.optim.Optimizer, found {type(optimizer).__name__}")
    check_outputs(outputs)
    if several and merge == "none" and run is None:
        raise UsageError('expected run= with merge="none", found none; name one directory on all ranks')
    if several and merge == "none" and stop_on is not None:
        raise UsageError(
            'expected no stop_on= with merge="none", found one: a rank that stops alone holds up the others'
        )
    directory = run_directory(run)
    if several and merge == "none":
        directory /= f"rank{dist.get_rank():05d}"
    chosen, source = choose_rules(rules)
    options = Options(
        every=every,
        spectrum_every=SPECTRUM_EVERY if spectrum_every is None else spectrum_every,
        rows=rows,
        sequences=sequences,
        rules=source,
        prometheus=prometheus_settings(prometheus),
        stop_on=stop_on,
        optimizer=type(optimizer).__name__ if optimizer else None,
        compiled=compiled,
        context=context,
        budget=budget,
        merge=merge,
        every_row=every_row,
        spectrum_layers=spectrum_layers,
    )
    try:
        probe = Probe(model, rows, sequences, adapters, compiled == "graph", context, every_row, spectrum_layers)
    except ValueError as error:
        raise UsageError(str(error)) from None
    metrics = tuple(Metric(*metric) for metric in METRICS)
    with of_file(rules if isinstance(rules, str | os.PathLike) else None):
        engine = Engine(chosen, metrics)
    facts = {"git": revision(), "model": type(model).__name__, "parameters": sum(x.numel() for x in model.parameters())}
    if several:
        facts |= {"ranks": dist.get_world_size(), "rank": dist.get_rank()}
    described = header(options, metrics, chosen, {"torch": torch.__version__}, **facts)

    unmet = not several and ranks.announced() > 1

    def record(place: Path) -> Journal:
        served, refused = prometheus_outputs(metrics, options.prometheus)
        try:
            writer = RunWriter(place, described)
        except BaseException as error:
            for output in served:
                output.discard()
            if unmet and isinstance(error, UsageError):  # another process was faster
                raise UsageError(f"{error}; {UNMET}") from None
            raise
        journal = Journal(writer, [LogOutput(), *served, *map(apart, outputs)])
        for text in refused:
            journal.problem("prometheus", text)
        if unmet and merge != "none":
            journal.problem("ranks", UNMET)
        return journal

    if not several or merge == "none":
        return Monitor(probe, record(directory), engine, metrics, options, optimizer, report)
    rank = dist.get_rank()
    own = directory.with_name(f"{directory.name}-rank{rank:05d}")
    try:
        together = ranks.Ranks("" if run is None else os.fspath(run))
    except Exception as error:  # a store that cannot do it
        journal = record(own if rank else directory)
        journal.problem("ranks", f"ranks are not merged: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return Monitor(probe, journal, engine, metrics, replace(options, stop_on=None), optimizer, report)
    journal = Journal(Elsewhere(directory), []) if rank else record(directory)
    alone = partial(record, own)
    return Monitor(probe, journal, engine, metrics, options, optimizer, report, together, alone)
