"""The loss of a step, as far as a script that was not written for it shows it: what it calls `backward` on."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor


class Losses:
    """Sums the losses of a step: each tensor of one number on which `backward` is called without a gradient.

    The gradients of a step are those of this sum: trainers that accumulate over micro-batches divide the parts, so
    that it is the mean. `install` replaces `torch.autograd.backward`, which `Tensor.backward` calls, by a function
    that notes its argument and calls the one it replaced. Nothing waits for the device.
    """

    def __init__(self) -> None:
        self._seen: list[Tensor] = []
        self._replaced: Any = None
        self._ours: Any = None

    def install(self) -> None:
        """Idempotent."""
        if self._ours is not None:
            return
        replaced = torch.autograd.backward

        @functools.wraps(replaced)
        def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
            if self._ours is not None and grad_tensors is None:
                self._note(tensors)
            replaced(tensors, grad_tensors, *rest, **named)

        self._replaced, self._ours = replaced, backward
        torch.autograd.backward = backward

    def remove(self) -> None:
        """Idempotent. Under a function that somebody else has put around it since, ours stays and notes nothing."""
        if torch.autograd.backward is self._ours:
            torch.autograd.backward = self._replaced
        self._ours = None
        self._seen = []

    def take(self) -> Tensor | None:
        """The sum since the last call, 0-d and detached; None when there was none."""
        seen, self._seen = self._seen, []
        return functools.reduce(operator.add, seen) if seen else None

    def _note(self, tensors: object) -> None:
        if isinstance(tensors, Tensor) and tensors.numel() == 1:
            # A copy: a trainer may go on to compute in its tensor.
            self._seen.append(tensors.detach().reshape(()).clone())
