"""The tiny language model that trainers train in tests, its data, and rules that fire at a known step."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests import vision as vision  # before transformers: it puts torchvision in order
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from attnwatch import Rule, Run

TOKENS, LENGTH = 32, 12
ALL_ROWS: dict[str, Any] = {"every": 1, "rows": None, "sequences": 1000, "report": False}
"""Options of a watch that measures every row of every step."""


def llama() -> LlamaForCausalLM:
    """Two layers of four heads and two of keys; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: LlamaForCausalLM = LlamaForCausalLM(
        LlamaConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, use_cache=False, **sizes, **heads)
    )
    return model.train()


def texts(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Random rows of one length: `input_ids` and `labels` `[LENGTH]`."""
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def below(rate: float, severity: str = "critical") -> Rule:
    """Fires at the first step whose learning rate is below: a schedule says which one that is."""
    return Rule(f"below_{rate}", severity, f"lr < {rate}", summary="the rate is low")


def rule_file(path: Path, *rates: float) -> Path:
    rules = (f'[[rule]]\nname = "below_{n}"\nseverity = "critical"\nwhen = "lr < {r}"\n' for n, r in enumerate(rates))
    path.write_text("\n".join(rules))
    return path


def overflow(model: LlamaForCausalLM, at: int) -> None:
    """Makes one gradient infinite in backward pass `at` (from 0), as too large a loss scale does."""
    passes = count()
    model.lm_head.weight.register_hook(lambda grad: grad * torch.inf if next(passes) == at else grad)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit by bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def hooks(model: nn.Module) -> int:
    """How many of forwards it carries."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def assert_samples(found: Run, expected: Run, rtol: float = 0.0, atol: float = 0.0, first: int = 0) -> None:
    """Every metric of every head at every step, from step `first` on."""
    steps = expected.steps[expected.steps >= first]
    assert found.steps.tolist() == steps.tolist()
    assert len(steps) > 0
    for metric in found.metrics:
        values = expected.metric(metric.name)[expected.steps >= first]
        np.testing.assert_allclose(found.metric(metric.name), values, rtol=rtol, atol=atol, err_msg=metric.name)
