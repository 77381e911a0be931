"""The number types of an attention call: what the model computes it in, and that statistics are not cast likewise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from attnwatch.hooks.attention import Attention


def computed_in(attention: Attention) -> torch.dtype:
    """What the logits are computed in: under autocast the fused kernels cast q and k first."""
    shaped = attention.scores if attention.scores is not None else attention.q
    assert shaped is not None
    kind = shaped.device.type
    if attention.scores is None and shaped.dtype == torch.float32 and torch.amp.is_autocast_available(kind):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else shaped.dtype
    return shaped.dtype


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast off."""
    if torch.amp.is_autocast_available(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield
