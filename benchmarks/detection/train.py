"""One recipe, trained and watched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.detection.data import IGNORED, SOURCES
from benchmarks.detection.models import build
from benchmarks.detection.recipe import Recipe
from benchmarks.detection.tasks import TASKS
from torch import nn
from torch.optim import Optimizer

import attnwatch

AFTER = 20
"""Steps that a run goes on after its loss stopped being a number, so that a sample sees it."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda groups, decay: torch.optim.Adam(groups, betas=(0.9, 0.95)),
    "adamw": lambda groups, decay: torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay),
    "adamw_999": lambda groups, decay: torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=decay),
    "adamax": lambda groups, decay: torch.optim.Adamax(groups, betas=(0.9, 0.95)),
    "radam": lambda groups, decay: torch.optim.RAdam(groups, betas=(0.9, 0.95)),
    "nadam": lambda groups, decay: torch.optim.NAdam(groups, betas=(0.9, 0.95)),
    "rmsprop": lambda groups, decay: torch.optim.RMSprop(groups, alpha=0.95),
    "sgd": lambda groups, decay: torch.optim.SGD(groups, momentum=0.9, weight_decay=decay),
}


def train(recipe: Recipe, run: Path, make: Callable[[Any], nn.Module] = build) -> None:
    """Leaves the run directory `run`. Its scalars: loss, grad_norm (before clipping) and lr of every step."""
    torch.manual_seed(recipe.seed)
    model = make(recipe)
    optimizer = OPTIMIZERS[recipe.optimizer](groups(model, recipe), decay=recipe.decay)
    order = torch.Generator().manual_seed(1000 + recipe.seed)

    def step(data: str, number: int, rate: float) -> dict[str, Any]:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        batch = (SOURCES | TASKS)[data](recipe.batch, recipe.length, number, order)
        scores = model(batch)
        loss = F.cross_entropy(scores.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or math.inf)
        optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item(), "lr": rate}

    for number in range(recipe.before):
        step(recipe.before_data, number, recipe.before_rate)
    knots = np.array(recipe.rate)
    end = recipe.steps
    with attnwatch.watch(
        model, run=run, every=recipe.every, spectrum_every=1, rows=recipe.rows, report=False
    ) as monitor:
        for number in range(recipe.steps):
            scalars = step(recipe.data, number, float(np.interp(number, knots[:, 0], knots[:, 1])))
            monitor.step(**scalars)
            if not math.isfinite(scalars["loss"]):
                end = min(end, number + AFTER)
            if number >= end:
                break


def groups(model: nn.Module, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Parameters by the factor on their learning rate."""
    found: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = recipe.qk_rate if "q_proj" in name or "k_proj" in name else recipe.mlp_rate if ".mlp." in name else 1.0
        found.setdefault(factor, []).append(parameter)
    for factor, parameters in found.items():
        yield {"params": parameters, "factor": factor}
