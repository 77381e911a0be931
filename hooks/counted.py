"""Which forwards are of training, and not repeated or rehearsed for another purpose."""

from __future__ import annotations

from types import FrameType

import torch

_STAGE = "torch.distributed.pipelining.stage"


def in_backward() -> bool:
    """Whether autograd runs: a forward seen now is the recomputation of an activation checkpoint.

    torch.utils.checkpoint asks the same private question. Without it nothing can be told apart: counts as forward."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


def is_rehearsed(caller: FrameType | None) -> bool:
    """Whether a pipeline stage runs the forward only to learn its shapes, on memory that nobody wrote: it does so
    before its first step. caller: of the forward."""
    while caller is not None:
        if caller.f_globals.get("__name__") == _STAGE and "inference" in caller.f_code.co_name:
            return True
        caller = caller.f_back
    return False
