"""Distributed checkpoints (torch.distributed.checkpoint), read by one process, tensor by tensor.

Their `.metadata` is a pickle, and torch unpickles it freely. Here it may name the classes of that format and no others.
"""

from __future__ import annotations

import logging
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from attnwatch.hooks.weight_files import Entry

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise ValueError(f"a pickle that asks for {module}.{name}: nothing was run")


class _Reader(FileSystemReader):
    """torch's reader of the data, which are loaded with weights_only, on metadata that were read with care."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta()
        return self._metadata


def open_dcp(
    path: Path,
) -> tuple[dict[str, Entry], tuple[Path, ...], Callable[[Sequence[str]], dict[str, Tensor]]]:
    """Its tensors, its files, and how to read some of the tensors. Raises ValueError, one line."""
    try:
        with open(path / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"a {type(metadata).__name__}")
        entries, files = _entries(path, metadata)
    except Exception as error:  # whatever a damaged or made-up pickle brings about
        raise _wrong(path, error) from None

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = {name: torch.empty(entries[name].shape, dtype=getattr(torch, entries[name].dtype)) for name in names}
        quiet = logging.getLogger("torch.distributed.checkpoint")
        level = quiet.level
        quiet.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group
                load(tensors, storage_reader=_Reader(path, metadata))
        except CheckpointException as error:  # no Exception: torch's own kind, around that of each rank
            raise _wrong(path, next(iter(error.failures.values()))[0]) from None
        except Exception as error:
            raise _wrong(path, error) from None
        finally:
            quiet.setLevel(level)
        return tensors

    return entries, (path / METADATA, *files), read


def _entries(path: Path, metadata: Metadata) -> tuple[dict[str, Entry], list[Path]]:
    """Tensors by name, and the files they lie in: plain names in this directory, as large as they must be."""
    sizes: dict[str, int] = {}
    held: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise ValueError(f"a file name {name[:80]!r} that leads out of the directory: nothing of it is read")
        if name not in sizes:
            sizes[name] = (path / name).stat().st_size
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[name]:
            raise ValueError(f"{name} of {sizes[name]:,} bytes, which is shorter than it says")
        held[index.fqn] = held.get(index.fqn, 0) + info.length
    entries = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            dtype, shape = stored.properties.dtype, torch.Size(stored.size)  # which takes whole numbers only
            if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize > held.get(name, 0):
                raise ValueError(f"{name!r} of shape {list(shape)} in {held.get(name, 0):,} bytes")
            entries[str(name)] = Entry(tuple(shape), str(dtype).removeprefix("torch."))
    return entries, [path / name for name in sorted(sizes)]


def _wrong(path: Path, error: BaseException) -> ValueError:
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, FileNotFoundError):
        text = f"no {Path(str(error.filename)).name!r}"
    if named:
        text = f"data that are a pickle that asks for {named[1]}: nothing was run"
    text = " ".join(text.split())[:200] or type(error).__name__
    return ValueError(f"expected a distributed checkpoint in {str(path)!r}, found: {text}; fetch or save it again")
