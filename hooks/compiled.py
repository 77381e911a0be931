"""Compiled models: hooks do not run inside a compiled graph, and say nothing of it.

For a sampled step the compiler's stance is set to run everything eagerly; the compiled graphs are left as they are and
used again afterwards, without a recompile. Rounding of that step is then the eager one's.
"""

from __future__ import annotations

from typing import Any

import torch


class EagerStep:
    """`start` and `stop` the eager stance; what the user had set is restored. The stance is one for the whole process."""

    def __init__(self) -> None:
        self._stance: Any = None

    def start(self) -> None:
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def stop(self) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
