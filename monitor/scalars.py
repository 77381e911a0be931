"""The scalars that steps passed, until they can be recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, SupportsFloat, TypeVar

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
