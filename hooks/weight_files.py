"""One file of weights: safetensors, or what `torch.save` wrote. Nothing in it is ever run."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}
"""By suffix."""

CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "model_state")
"""Under which key of a training checkpoint the model lies, first one first."""

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


_POINTER = b"version https://git-lfs"


class Entry(NamedTuple):
    """What is known of a tensor that was not read. dtype: torch's name ("float16"), the file's own, or "meta" for one
    that was saved without its numbers."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


def open_file(path: Path) -> tuple[dict[str, Entry], Callable[[Sequence[str]], dict[str, Tensor]]]:
    """Its tensors, and how to read some of them. Raises ValueError, one line."""
    with suppress(OSError), open(path, "rb") as file:  # which the readers name better
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"expected weights in {str(path)!r}, found a pointer of Git LFS to them; git lfs pull")
    return _open_safetensors(path) if KINDS[path.suffix.lower()] == "safetensors" else _open_torch(path)


# --- safetensors ------------------------------------------------------------------------------------------------------


def _open_safetensors(path: Path) -> tuple[dict[str, Entry], Callable[[Sequence[str]], dict[str, Tensor]]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            f"expected the package safetensors to read {path.name}, found it missing; pip install attnwatch[scan]"
        ) from None

    def opened(names: Sequence[str] | None) -> Any:
        """Entries of all (names: None), or tensors of some. Opened anew each time, so that no page stays mapped."""
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if names is not None:
                    return {name: file.get_tensor(name).clone() for name in names}
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                return {
                    name: Entry(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()))
                    for name, part in slices.items()
                }
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
            raise _unreadable(path, "safetensors", error) from None

    return opened(None), opened


# --- torch.save -------------------------------------------------------------------------------------------------------


def _open_torch(path: Path) -> tuple[dict[str, Entry], Callable[[Sequence[str]], dict[str, Tensor]]]:
    entries = {
        name: Entry(tuple(x.shape), "meta" if x.is_meta else str(x.dtype).removeprefix("torch."))
        for name, x in _load(path).items()
    }

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = _load(path)
        return {name: _copied(path, name, tensors[name]) for name in names}

    return entries, read


def _load(path: Path) -> dict[str, Tensor]:
    """Every tensor of a model in the file, mapped where the format allows it."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(4) == b"PK\3\4"
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                    raise ValueError("compressed records, which torch.save does not write")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old pickle protocols
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        return dict(_tensors(content))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"a pickle that asks for {named[1]}" if named else "a pickle of more than tensors"
        raise ValueError(
            f"expected tensors in {str(path)!r}, found {what}: nothing was run; save the state dict by itself, best as "
            "safetensors"
        ) from None
    except Exception as error:  # whatever a damaged or made-up file brings about in the readers of zip and pickle
        raise _unreadable(path, "torch.save", error) from None


def _tensors(content: object) -> Iterator[tuple[str, Tensor]]:
    """Tensors by dotted name; what belongs to an optimizer is left out, and the model's own key (CONTAINERS)."""
    if not isinstance(content, Mapping):
        raise ValueError(f"a {type(content).__name__}, no state dict")
    inner = next((key for key in CONTAINERS if isinstance(content.get(key), Mapping)), None)
    for key, value in content.items():
        if key == inner:
            yield from _flat(value, "")
        elif not str(key).lower().startswith("optim"):
            yield from _flat({key: value}, "")


def _flat(value: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, item in value.items():
        if isinstance(item, Tensor):
            yield f"{prefix}{key}", item
        elif isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")


def _copied(path: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise ValueError(f"expected {name!r} in {str(path)!r} as a plain matrix, found {tensor.layout}; save it dense")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"expected {name!r} in {str(path)!r} to hold {list(tensor.shape)} numbers, found "
            f"{tensor.untyped_storage().nbytes():,} bytes of them; save the state dict anew"
        )
    return tensor.detach().clone()


def _unreadable(path: Path, kind: str, error: Exception) -> ValueError:
    text = " ".join(str(error).split())[:160] or type(error).__name__
    return ValueError(f"expected a whole {kind} file at {str(path)!r}, found: {text}; fetch or save it again")
