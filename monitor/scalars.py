"""The scalars that steps passed, until they can be recorded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, SupportsFloat, TypeVar

Later = TypeVar("Later", bound=SupportsFloat)
"""A number that an accelerator still holds: making a float of it waits for the device."""


class Pending(Generic[Later]):
    """Scalars by step, oldest first. Some are floats, others become floats with the next sample."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, dict[str, float | Later]]] = deque()

    def add(self, step: int, values: dict[str, float | Later]) -> None:
        self._steps.append((step, values))

    def later(self) -> list[Later]:
        """Those that are no floats yet."""
        return [value for _, values in self._steps for value in values.values() if not isinstance(value, float)]

    def settle(self, numbers: Sequence[float]) -> None:
        """What `later()` became, in its order."""
        rest = iter(numbers)
        for _, values in self._steps:
            values.update({name: float(next(rest)) for name, value in values.items() if not isinstance(value, float)})

    def take(self, before: int | None = None) -> Iterator[tuple[int, dict[str, float]]]:
        """Takes out the steps below `before` (None: all of them)."""
        while self._steps and (before is None or self._steps[0][0] < before):
            step, values = self._steps.popleft()
            yield step, {name: float(value) for name, value in values.items()}


def step_number(given: Any, following: int, problem: Callable[[str, str], None]) -> int:
    """The number of a step; `following` without one. What is none is named by `problem(where, text)`."""
    try:
        return following if given is None else int(given)
    except (TypeError, ValueError):
        text = f"expected a whole number, found {type(given).__name__}; leave it out to count from 0"
        problem("step", text)
        return following


def plain(name: str, value: Any, problem: Callable[[str, str], None]) -> Any:
    """A float; or a tensor of an accelerator, kept until the next sample so that nothing waits for the device."""
    is_tensor = hasattr(value, "detach")
    if type(value).__name__ == "DTensor":  # as FSDP gives the norm of its gradients
        if not all(placement.is_replicate() for placement in value.placements):
            problem(name, "expected a number, found a part of one that several ranks hold; pass its .full_tensor()")
            return math.nan  # putting it together is a collective, which other ranks may not join
        value = value.to_local()
    if is_tensor and value.numel() != 1:
        problem(name, f"expected a scalar, found a tensor of shape {list(value.shape)}; pass its mean")
        return math.nan
    if is_tensor and value.device.type != "cpu":
        return value.detach().clone()
    try:
        return float(value.detach() if is_tensor else value)
    except (TypeError, ValueError, RuntimeError):
        problem(name, f"expected a number, found {type(value).__name__}; pass a float or a 0-d tensor")
        return math.nan
