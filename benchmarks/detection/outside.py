"""Runs of models that the benchmark does not have, as users train them: do the default rules cry wolf?

python -m benchmarks.detection.outside      trains what is missing, one run after the other, and prints two tables

Models of transformers (and torch's own encoder) from fresh weights, on the benchmark's text and digits. No rule was
chosen on any of these runs. The second table: some of them again, at a rate far too high.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from dataclasses import dataclass, replace
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.detection.data import Batch
from benchmarks.detection.markdown import table
from benchmarks.detection.models import CLASSES, sizes
from benchmarks.detection.recipe import COLLAPSES, HEALTHY, Knots, Recipe
from benchmarks.detection.run import stored
from benchmarks.detection.score import Case
from benchmarks.detection.study import cases, known
from benchmarks.detection.train import train
from benchmarks.detection.truth import MARGIN
from numpy.typing import NDArray
from torch import Tensor, nn

from attnwatch.monitor.rules import load_rules

SPAN = 50
"""Steps whose mean loss is compared with the usual run's."""

SEVERITIES = ("critical", "warning", "info")
HEAD = ("run", "peak rate", "steps", "final loss", "became", "behind from", "diverged at", *SEVERITIES)


@dataclass(frozen=True)
class Outside(Recipe):
    """call: a model type of transformers, or "encoder" for nn.TransformerEncoder. Dropout, ties and whatever else
    settings (of the model's config) does not name are as the family has them. bf16: forward under autocast."""

    settings: tuple[tuple[str, Any], ...] = ()
    bf16: bool = False


def cosine(peak: float, steps: int, warm_up: int = 50) -> Knots:
    """Linear to the peak, then half a cosine down to a tenth of it."""
    parts = [n / 20 for n in range(21)]
    down = ((warm_up + x * (steps - warm_up), peak * (0.55 + 0.45 * cos(pi * x))) for x in parts)
    return (0, peak / warm_up), *((round(step), rate) for step, rate in down)


def sound(name: str, call: str, peak: float, steps: int = 500, warm_up: int = 50, **changes: Any) -> Outside:
    usual: dict[str, Any] = {
        "length": 64, "layers": 4, "batch": 8, "mlp": 4, "optimizer": "adamw", "decay": 0.1, "clip": 1.0, "every": 10
    }  # fmt: skip
    return Outside(name, HEALTHY, cosine(peak, steps, warm_up), steps, call=call, **(usual | changes))


NO_DROPOUT = (("resid_pdrop", 0.0), ("embd_pdrop", 0.0), ("attn_pdrop", 0.0))

USUAL = (
    sound("gpt2", "gpt2", 6e-4, 600, width=128),
    sound("gpt2_bf16", "gpt2", 1e-3, settings=NO_DROPOUT, bf16=True, layers=6, seed=1),
    sound("gpt2_long_warm_up", "gpt2", 2e-3, 700, 350, settings=NO_DROPOUT),
    sound("gpt2_tune", "gpt2", 1e-4, 400, before=400, before_rate=1e-3, data="prose"),
    sound("llama", "llama", 1e-3, kv_heads=2),
    sound("llama_fast", "llama", 3e-3, layers=6, clip=0.0, seed=1),
    sound("llama_tied_bf16", "llama", 1e-3, settings=(("tie_word_embeddings", True),), bf16=True),
    sound("llama_long", "llama", 1e-3, 300, length=256, batch=4),
    sound("llama_more_steps", "llama", 3e-3, 2000, 100),
    sound("gemma2", "gemma2", 1e-3, settings=(("head_dim", 16), ("sliding_window", 32))),
    sound("gemma3", "gemma3_text", 3e-3, settings=(("head_dim", 16), ("sliding_window", 16))),
    sound("olmo2", "olmo2", 3e-3),
    sound("phi", "phi", 1e-3, optimizer="adamw_999"),
    sound("gpt_neox_bf16", "gpt_neox", 1e-3, bf16=True),
    sound("qwen3", "qwen3", 3e-3, kv_heads=1, settings=(("head_dim", 16),)),
    sound("bloom", "bloom", 1e-3),
    sound("opt", "opt", 6e-4, optimizer="adamw_999", settings=(("word_embed_proj_dim", 64), ("ffn_dim", 256))),
    sound("lfm2", "lfm2", 1e-3, kv_heads=2, layers=6, settings=(("full_attn_idxs", (2, 5)),)),
    sound("gpt_oss", "gpt_oss", 1e-3, kv_heads=2, settings=(
        ("head_dim", 16), ("num_local_experts", 4), ("num_experts_per_tok", 2), ("sliding_window", 32)
    )),
    sound("bert", "bert", 1e-3, 700, 100, data="masked"),
    sound("modernbert", "modernbert", 1e-3, data="masked", settings=(("local_attention", 32),)),
    sound("t5", "t5", 1e-3, data="continued", settings=(("d_kv", 16), ("num_decoder_layers", 4))),
    sound("vit", "vit", 1e-3, data="digits_4", batch=32),
    sound("encoder", "encoder", 1e-3, data="padded"),
)  # fmt: skip


def hot(name: str, peak: float) -> Outside:
    """The run of that name, at another rate."""
    usual = next(run for run in USUAL if run.name == name)
    return replace(usual, name=f"{name}_hot", label=COLLAPSES, reference=name, rate=((0, peak / 300), (300, peak)))


HOT = tuple(
    hot(name, peak)
    for name, peak in (
        ("gpt2", 0.05), ("llama_fast", 0.05), ("phi", 0.05), ("gpt_neox_bf16", 0.05), ("bert", 0.03), ("t5", 0.1),
        ("bloom", 0.05), ("encoder", 0.05), ("vit", 0.05),
        ("gpt2_bf16", 0.05), ("llama", 0.02), ("opt", 0.03), ("lfm2", 0.05), ("olmo2", 0.05), ("qwen3", 0.05)
    )
)  # fmt: skip


class Model(nn.Module):
    """A model of transformers that takes a `Batch` and gives scores `[B, T, 256]`, or `[B, 10]` of images."""

    def __init__(self, recipe: Outside):
        super().__init__()
        from tests import vision as vision  # before transformers
        from transformers import AutoConfig
        from transformers.models.auto import modeling_auto

        settings: dict[str, Any] = {
            **sizes(recipe),
            "num_key_value_heads": recipe.kv_heads or recipe.heads,
            "d_ff": recipe.mlp * recipe.width,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in recipe.settings},
        }
        if recipe.data in CLASSES:
            settings |= {"num_labels": 10, "image_size": 8, "patch_size": 4, "num_channels": 1}
        kind = {"masked": "MaskedLM", "continued": "Seq2SeqLM"}.get(recipe.data, "CausalLM")
        kind = "ImageClassification" if recipe.data in CLASSES else kind
        self.inner = getattr(modeling_auto, f"AutoModelFor{kind}").from_config(
            AutoConfig.for_model(recipe.call, **settings)
        )
        self.kind = kind

    def forward(self, batch: Batch) -> Tensor:
        x = batch.inputs
        half = x.shape[1] // 2
        arguments: dict[str, Tensor]
        if self.kind == "ImageClassification":
            arguments = {"pixel_values": image(x)}
        elif self.kind == "Seq2SeqLM":
            arguments = {"input_ids": x[:, :half], "decoder_input_ids": x[:, half:]}
        else:
            arguments = {"input_ids": x}
            if batch.padding is not None:
                arguments["attention_mask"] = (~batch.padding).long()
        scores: Tensor = self.inner(**arguments).logits
        return F.pad(scores, (0, 0, half, 0)) if self.kind == "Seq2SeqLM" else scores


def image(patches: Tensor) -> Tensor:
    """`[B, 4, 16]`, patches of 4 x 4 in rows, as `[B, 1, 8, 8]`."""
    whole: Tensor = patches.unflatten(2, (4, 4)).unflatten(1, (2, 2)).transpose(2, 3).reshape(-1, 1, 8, 8)
    return whole


class Encoder(nn.Module):
    """nn.TransformerEncoder with a causal mask and one of the padding."""

    def __init__(self, recipe: Outside):
        super().__init__()
        self.embedding = nn.Embedding(256, recipe.width)
        self.position = nn.Parameter(torch.randn(recipe.length, recipe.width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            recipe.width, recipe.heads, recipe.mlp * recipe.width, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, recipe.layers, enable_nested_tensor=False)
        self.head = nn.Linear(recipe.width, 256)

    def forward(self, batch: Batch) -> Tensor:
        later = torch.ones(batch.inputs.shape[1], batch.inputs.shape[1], dtype=torch.bool).triu(1)
        x = self.embedding(batch.inputs) + self.position
        out: Tensor = self.head(self.layers(x, later, batch.padding, is_causal=True))
        return out


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores: Tensor = self.inner(batch)
        return scores.float()


def build(recipe: Outside) -> nn.Module:
    """The model as it begins. Draws on torch's random state."""
    model = Encoder(recipe) if recipe.call == "encoder" else Model(recipe)
    return Autocast(model) if recipe.bf16 else model


def behind(losses: NDArray[np.float64], usual: NDArray[np.float64]) -> int | None:
    """First step from which on the mean of SPAN losses stays MARGIN above that of the usual run, for good."""
    more = losses - usual[: len(losses)]
    more = more[: np.argmin(np.isfinite(more)) or None]
    late = np.convolve(more, np.full(SPAN, 1 / SPAN), "valid") >= MARGIN
    start = len(late) - int(np.argmin(late[::-1])) if not late.all() else 0
    return start + SPAN - 1 if start < len(late) else None


def row(case: Case, late: int | None) -> tuple[str, ...]:
    """Below HEAD. late: as `behind` gives it."""
    recipe, truth = case.recipe, case.truth
    peak = max(rate for _, rate in recipe.rate)
    alerts = []
    for severity in SEVERITIES:
        first: dict[str, int | None] = {}
        for alert in case.fired(lambda alert, s=severity: alert.severity == s):  # type: ignore[misc]
            first.setdefault(alert.rule, alert.fired_step)
        alerts.append(", ".join(f"`{rule}` {step}" for rule, step in first.items()))
    onset, since = ("" if step is None else str(step) for step in (truth.onset, late))
    return f"`{recipe.name}`", f"{peak:g}", str(recipe.steps), f"{truth.final:.2f}", truth.label, since, onset, *alerts


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.detection.outside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/detection"), help="where the runs are kept")
    runs: Path = parser.parse_args().runs
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for recipe in (*USUAL, *HOT):
        if stored(recipe, runs) is None:
            shutil.rmtree(runs / recipe.folder, ignore_errors=True)  # of one that was interrupted
            train(recipe, runs / recipe.folder, build)
    found = known((*USUAL, *HOT), runs)
    judged = cases(found, load_rules())
    losses = {x.recipe.name: x.run.scalar("loss")[1] for x in found}
    for some in (USUAL, HOT):
        rows = [
            row(case, behind(losses[case.recipe.name], losses[case.recipe.reference or case.recipe.name]))
            for case in judged
            if case.recipe in some
        ]
        print(table(HEAD, rows), end="\n\n")


if __name__ == "__main__":
    main()
