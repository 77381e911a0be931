"""Run directories made up for the tests of the report: numbers whose story is known, written by the real writer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.sample import Coverage, Metric, Sample
from attnwatch.monitor.store import RunWriter

WEIGHTS = ("qk_", "wq_", "wk_", "layer_", "logit_bound")
METRICS = (
    "logit_max", "logit_spread", "spread_ratio", "entropy", "entropy_ratio", "sink_mass", "first_key_mass",
    "saturated_rows", "softmax_gradient", "map_rank", "query_norm_max", "key_norm_max", "nonfinite", "qk_sigma_max",
    "qk_energy_top1", "qk_energy_top10", "qk_directions_90", "qk_rank", "qk_rank_ratio", "wq_sigma_max",
    "wk_sigma_max", "logit_bound", "bound_use", "layer_energy_top10", "layer_directions_90",
)  # fmt: skip
RULES = [
    {
        "name": "sparse_low_rank", "severity": "critical", "unless": "first_key_mass > 0.5", "at_once": None,
        "when": "entropy_ratio < 0.3 and qk_rank_ratio < 0.5 and spread_ratio > 3", "scope": "model", "share": 0.25,
        "hold": 3, "keep": 5, "summary": "", "advice": "",
    },
    {
        "name": "entropy_collapse", "severity": "warning", "unless": "first_key_mass > 0.5", "at_once": None,
        "when": "entropy_ratio < 0.5 and qk_rank_ratio < 0.5 and spread_ratio > 4", "scope": "model", "share": 0.25,
        "hold": 2, "keep": 5, "summary": "", "advice": "",
    },
    {
        "name": "logit_growth", "severity": "info", "unless": None, "at_once": None, "when": "logit_max > 100",
        "scope": "layer", "share": 0.01, "hold": 2, "keep": 5, "summary": "", "advice": "",
    },
    {
        "name": "loss_divergence", "severity": "critical", "unless": None, "at_once": "not finite(loss)",
        "when": "mean(loss, 20) > lowest(mean(loss, 20)) + 0.3", "scope": "model", "share": 0.25, "hold": 40,
        "keep": 40, "summary": "", "advice": "",
    },
]  # fmt: skip
ADVICE = (
    "Stop and go back to a checkpoint before step 520. Then lower the learning rate or lengthen the warm-up, add "
    "QK-norm, or clip the query and key weights (QK-Clip)."
)


def metric(name: str) -> Metric:
    merge = "last" if name.startswith(WEIGHTS) else "max" if name.endswith("_max") else "mean"
    return Metric(name, "nat" if name == "entropy" else "1", f"What {name} means, in a sentence.", merge)


def header(metrics: tuple[str, ...] = METRICS, **options: object) -> dict[str, object]:
    return {
        "attnwatch": "0.1.0", "created": "2026-11-30T12:00:00+00:00", "model": "TinyGPT", "parameters": 1_234_567,
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.0"},
        "options": {"every": 10, "rows": 64, **options},
        "metrics": [asdict(metric(name)) for name in metrics], "rules": RULES,
    }  # fmt: skip


def alert(rule: str = "sparse_low_rank", **changes: object) -> Alert:
    """A critical alert that was pending at 520 and fired at 540."""
    fields: dict[str, object] = {
        "rule": rule, "severity": "critical", "state": "firing", "place": "model", "pending_step": 520,
        "fired_step": 540, "resolved_step": None, "share": 0.29, "heads": (("blocks.9.attention", 1),),
        "values": {"entropy_ratio": 0.12, "qk_rank_ratio": 0.31, "spread_ratio": 5.5, "first_key_mass": 0.02},
        "summary": "29 % of all heads are sparse and low-rank.", "advice": ADVICE,
    }  # fmt: skip
    return Alert(**{**fields, **changes})  # type: ignore[arg-type]


def divergence(onset: int, fired: int) -> Alert:
    return alert(
        "loss_divergence", pending_step=onset, fired_step=fired, heads=(), values={"loss": 3.1},
        summary="The loss is 0.3 above its lowest mean.", advice="",
    )  # fmt: skip


def event(kind: str, **fields: object) -> dict[str, object]:
    return {"event": kind, **fields}


def write_coverage(writer: RunWriter, layers: list[Coverage]) -> None:
    writer.event(event("coverage", step=0, layers=[asdict(layer) for layer in layers]))


def write_alert(writer: RunWriter, each: Alert) -> None:
    writer.event(event("alert", step=each.fired_step or each.pending_step, **asdict(each)))


def write_end(writer: RunWriter, step: int, samples: int) -> None:
    writer.event(event("end", step=step, time=0.0, samples=samples, seconds=1.0))
    writer.close()


def collapse(
    path: Path, *, collapses: bool = True, layers: int = 12, heads: int = 4, steps: int = 800, every: int = 10,
    metrics: tuple[str, ...] = METRICS, ends: bool = True,
) -> Path:  # fmt: skip
    """Attention collapses from the deepest layers on, about step 480; the loss follows from step 688 when it does.

    The alert of sparse_low_rank fires at 540, so that its lead is 688 - 540 = 148 steps.
    """
    rng = np.random.default_rng(7)
    names = tuple(f"blocks.{index}.attention" for index in range(layers))
    writer = RunWriter(path, header(metrics, qk_norm="none" if collapses else "rms", lr=0.1))
    write_coverage(writer, [Coverage(name, "verified", heads, heads, 16, "", "", "float32") for name in names])
    character = rng.normal(0, 1, (layers, heads))
    sinks = rng.random((layers, heads)) < 0.12
    depth = np.linspace(0, 1, layers)[:, None] + 0.18 * character
    for step in range(0, steps + 1, every):
        # 0 healthy to 1 collapsed: deep layers first, each head at its own time.
        fall = 1 / (1 + np.exp(-(step - 620 + 170 * depth) / 28)) if collapses else np.zeros((layers, heads))
        early = 1 - np.exp(-step / 90)
        jitter = 1 + 0.04 * rng.normal(size=(layers, heads))
        entropy = np.clip((0.95 - early * (0.28 + 0.07 * character)) * (1 - 0.985 * fall) * jitter, 0.004, 0.999)
        entropy = np.where(sinks, np.minimum(entropy, 1 - 0.82 * early), entropy)
        spread = (0.4 + early * (0.9 + 0.2 * character)) * np.exp(3.6 * fall) * jitter
        rank = np.clip((1.0 - early * (0.2 + 0.05 * character)) * (1 - 0.75 * fall) * jitter, 0.03, 1.1)
        table = {
            "entropy_ratio": entropy, "entropy": entropy * np.log(32), "spread_ratio": np.abs(spread),
            "logit_spread": np.abs(spread) * 8, "logit_max": np.abs(spread) * 4.5 * np.exp(1.6 * fall),
            "saturated_rows": np.clip(fall * 0.96 * jitter, 0, 1), "softmax_gradient": np.clip(entropy * 1.05, 0, 1),
            "first_key_mass": np.where(sinks, early * 0.86, 0.05 * jitter),
            "sink_mass": np.where(sinks, early * 0.87, 0.09 * jitter + 0.3 * fall), "map_rank": 2 + 20 * entropy,
            "query_norm_max": 3 * np.exp(2.1 * fall) * jitter, "key_norm_max": 2.8 * np.exp(2 * fall) * jitter,
            "nonfinite": np.zeros((layers, heads)), "qk_rank_ratio": rank, "qk_rank": rank * 12,
            "qk_directions_90": np.round(rank * 11), "qk_energy_top1": np.clip(0.24 / rank, 0, 1),
            "qk_energy_top10": np.clip(0.86 + 0.14 * fall, 0, 1), "qk_sigma_max": 1.5 * np.exp(4 * fall) * jitter,
            "wq_sigma_max": 1.3 * np.exp(2 * fall) * jitter, "wk_sigma_max": 1.2 * np.exp(2 * fall) * jitter,
            "layer_energy_top10": np.repeat(np.clip(0.4 + 0.5 * fall.mean(1, keepdims=True), 0, 1), heads, axis=1),
            "layer_directions_90": np.repeat(np.round(40 - 30 * fall.mean(1, keepdims=True)), heads, axis=1),
        }  # fmt: skip
        values = np.stack([table.get(name, np.full((layers, heads), np.nan)) for name in metrics])
        if step % (5 * every):
            values[[name.startswith(WEIGHTS) for name in metrics]] = np.nan
        writer.sample(Sample(step, 1.8e9 + step * 0.05, metrics, names, values.astype(np.float32), 0.021))
    for step in range(steps + 1):
        loss = 2.25 + 1.9 * np.exp(-step / 70) + 0.05 * rng.normal()
        if collapses:
            loss += 1.1 / (1 + np.exp(-(step - 715) / 14))
        writer.scalars(step, {"loss": float(loss), "lr": 0.1 * min(step / 600, 1)})
    if collapses:
        worst = tuple((names[-1 - index // 3], index % heads) for index in range(min(8, layers * heads)))
        write_alert(writer, alert("logit_growth", severity="info", place=names[-1], pending_step=500, fired_step=510))
        write_alert(
            writer, alert("entropy_collapse", severity="warning", pending_step=510, fired_step=520, heads=worst)
        )
        write_alert(writer, alert(heads=worst))
        write_alert(
            writer,
            alert(
                "benign_sparsity",
                severity="info",
                state="resolved",
                pending_step=440,
                fired_step=460,
                resolved_step=540,
            ),
        )
        write_alert(writer, divergence(688, 728))
    if ends:
        write_end(writer, steps, steps // every + 1)
    return path
