"""The loss of a step, as far as a script that was not written for it shows it: what it calls `backward` on."""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger("attnwatch")


@dataclass
class _Step:
    """Of one thread: several may train a model each."""

    thread: threading.Thread
    sum: Tensor | None = None
    is_whole: bool = True
    is_taken: bool = False


class Losses:
    """Sums the losses of a step, in each thread apart: each tensor of one number on which `backward` is called without
    a gradient.

    The gradients of a step are those of this sum: trainers that accumulate over micro-batches divide the parts, so
    that it is the mean. `install` replaces `torch.autograd.backward`, which `Tensor.backward` calls, by a function
    that notes its argument and calls the one it replaced. Nothing waits for the device.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
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
        self._ours, self._steps = None, {}

    def take(self) -> Tensor | None:
        """The sum, 0-d and detached; None when there was none, or a part of it is unknown. A new one begins with the
        next loss: optimizers that step one after the other have the same."""
        steps = self._steps
        step = steps.get(threading.get_ident())
        if step is None and len(steps) == 1:  # an optimizer that steps within the backward does so in a thread of that
            step = next(iter(steps.values()))
        if step is None:
            return None
        step.is_taken = True
        return step.sum if step.is_whole else None

    def _note(self, tensors: object) -> None:
        thread, number = threading.current_thread(), threading.get_ident()
        if number not in self._steps:
            self._forget_ended()
        step = self._steps.setdefault(number, _Step(thread))
        step.thread = thread
        if step.is_taken:
            step.sum, step.is_whole, step.is_taken = None, True, False
        try:
            if isinstance(tensors, Tensor) and tensors.numel() == 1:
                # A copy: a trainer may go on to compute in its tensor.
                loss = tensors.detach().reshape(()).clone()
                step.sum = loss if step.sum is None else step.sum + loss.to(step.sum.device)
        except Exception as error:  # tensors of other people's kinds
            step.is_whole = False
            LOG.debug("attnwatch: a loss that cannot be read: %s: %s", type(error).__name__, error)

    def _forget_ended(self) -> None:
        """Some scripts have a thread for every step."""
        for number, step in list(self._steps.items()):
            if step.is_taken and not step.thread.is_alive():
                self._steps.pop(number, None)
