"""Libraries that only some people have: imported where they are used, and missed in one line."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def need(module: str, extra: str) -> Any:
    """The module. Raises ImportError, one line that says what to install, when its library is not there."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"expected {module.split('.')[0]} to be installed, found: {error}; pip install attnwatch[{extra}]"
        ) from None
