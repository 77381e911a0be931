"""The scalars that steps passed, until they can be recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Later = TypeVar("Later")
"""A number that an accelerator still holds; reading it would wait for the device."""


class Pending(Generic[Later]):
    """Scalars by step, oldest first. Some are numbers, others become numbers with the next sample."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, dict[str, float | Later]]] = deque()

    def add(self, step: int, values: dict[str, float | Later]) -> None:
        self._steps.append((step, values))

    def later(self) -> list[Later]:
        """Those that are not numbers yet."""
        return [value for _, values in self._steps for value in values.values() if not isinstance(value, float)]

    def settle(self, numbers: Sequence[float]) -> None:
        """The numbers that `later()` became, in its order."""
        rest = iter(numbers)
        for _, values in self._steps:
            for name, value in values.items():
                values[name] = value if isinstance(value, float) else float(next(rest))

    def take(self, before: int | None, read: Callable[[Later], float]) -> Iterator[tuple[int, dict[str, float]]]:
        """Takes out the steps below `before` (None: all); `read` makes a number of what is not one yet."""
        while self._steps and (before is None or self._steps[0][0] < before):
            step, values = self._steps.popleft()
            yield step, {name: x if isinstance(x, float) else read(x) for name, x in values.items()}
