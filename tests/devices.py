"""What an accelerator would have to wait for, seen on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SYNCS = frozenset({
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2",
    "_linalg_eigh", "_linalg_svd", "_linalg_check_errors",
})  # fmt: skip
"""aten operators that wait for an accelerator, because the host needs what they return."""


def waits(func: Any, args: Any, syncs: Collection[str] = SYNCS) -> str:
    """The operator's name if it would wait, else ""."""
    name: str = func._schema.name.removeprefix("aten::")
    by_mask = name in ("index", "index_put", "index_put_") and any(
        i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )
    return name if name in syncs or (by_mask and syncs) else ""


class Watch(TorchDispatchMode):
    """Refuses operations that wait for the device, if not told to let them; keeps the size of the largest result."""

    def __init__(self, syncs: Collection[str] = SYNCS) -> None:
        super().__init__()
        self.syncs = syncs
        self.largest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        waiting = waits(func, args, self.syncs)
        assert not waiting, f"{waiting} waits for the device"
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.numel())
        return result
