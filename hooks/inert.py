"""The hooks before and after a module's forward. Copies of the model do not take them along."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import nn


class Owner(Protocol):
    """Who is told that a forward begins and ends."""

    def enter(self, name: str, module: nn.Module) -> None: ...

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None: ...


class Enter:
    """An EMA copy or a saved model gets one that does nothing instead."""

    def __init__(self, probe: Owner, name: str):
        self._probe, self._name = probe, name

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if not torch.compiler.is_compiling():  # in spite of the eager stance, if the user has set another one
            self._probe.enter(self._name, module)

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__  # takes anything, returns None

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a saved model loads where attnwatch is not installed


class Leave(Enter):
    def __call__(self, module: nn.Module, arguments: Any, output: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self._probe.leave(module, arguments, output)
