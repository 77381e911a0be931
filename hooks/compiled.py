"""Compiled models: hooks do not run inside a compiled graph, and say nothing of it.

For a sampled step the compiler's stance is set to run everything eagerly; the compiled graphs are left as they are and
used again afterwards, without a recompile. Rounding of that step is then the eager one's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class EagerStep:
    """`start` and `stop` the eager stance. There is one for the whole process: the last of several steps that overlap
    restores what the user had set. held: false when somebody else set a stance while the step ran."""

    _running: ClassVar[list[EagerStep]] = []
    _stance: ClassVar[Any] = None

    def __init__(self) -> None:
        self.held = True

    def start(self) -> None:
        if not self._running:
            EagerStep._stance = torch.compiler.set_stance("force_eager")
        if self not in self._running:
            self._running.append(self)

    @classmethod
    def runs(cls) -> bool:
        """Whether any step holds the stance."""
        return bool(cls._running)

    def stop(self) -> None:
        if self not in self._running:
            return
        self._running.remove(self)
        if not self._running:
            ours, now = self._stance, torch.compiler.set_stance("force_eager")
            self.held = now.prev is ours.stance
            # What the user set while the step ran stays as the user set it.
            (ours if self.held else now).__exit__(None, None, None)
