"""Weights on a disk, tensor by tensor: what a saved model holds is known at once, and read a few tensors at a time.

    safetensors     one file, or shards named by an index
    torch.save      .pt .pth .bin .ckpt, loaded with weights_only, always: what a pickle would run is refused, not run
    a directory     of Hugging Face (config.json beside the weights), of DeepSpeed, or a distributed checkpoint (DCP)

Nothing stays mapped between two reads: resident memory is that of the tensors asked for, whatever the file's size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from attnwatch.hooks import dcp, weight_files
from attnwatch.hooks.weight_files import Entry

Read = Callable[[Sequence[str]], dict[str, Tensor]]

INDEX_LIMIT = 64 << 20
"""Bytes of the largest index or config that is read."""

_INDEX = ".index.json"
_FIRST = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
    "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip
_NO_WEIGHTS = re.compile(
    r"(?<!model_)optim|sched|scaler|training_args|rng_state|random_states|trainer_state", re.IGNORECASE
)
_SHARD = re.compile(r"-\d+-of-\d+|mp_rank_\d+|zero_pp_rank|consolidated\.\d+|[._-]rank[._-]?\d+", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"mp_rank_\d+")
"""Of Megatron: one rank's part of the model, whole where there is no other."""


class Source(NamedTuple):
    """What a path stands for. kind: "safetensors", "torch", "index" or "dcp"; path: the file (DCP: directory)."""

    kind: str
    path: Path


@dataclass(frozen=True)
class Checkpoint:
    """One saved model. tensors: by name. config: of config.json (or params.json) beside it, {} without one.

    files: what it is made of. read: the tensors of these names, on the CPU; raises ValueError, one line."""

    path: Path
    tensors: Mapping[str, Entry]
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    read: Read


def source_of(path: Path) -> Source | None:
    """Where the weights at a path are, None where there are none (or several that no index holds together)."""
    if path.is_file():
        if path.name.endswith(_INDEX):
            return Source("index", path)
        kind = weight_files.KINDS.get(path.suffix.lower())
        return None if kind is None else Source(kind, path)
    if not path.is_dir():
        return None
    if (path / dcp.METADATA).is_file():
        return Source("dcp", path)
    for name in _FIRST:
        if (path / name).is_file():
            return source_of(path / name)
    inside = sorted(entry for entry in path.iterdir() if not _NO_WEIGHTS.search(entry.name))
    indices = [entry for entry in inside if entry.name.endswith(_INDEX)]
    files = [entry for entry in inside if entry.is_file() and entry.suffix.lower() in weight_files.KINDS]
    folders = [entry for entry in inside if _is_file(entry / dcp.METADATA) or _RANK_FOLDER.match(entry.name)]
    for found in (indices, files, folders):
        if len(found) == 1:
            return source_of(found[0])
        if found:
            return None
    return None


def _is_file(path: Path) -> bool:
    """False, too, in a directory that may not be entered."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_checkpoint(path: Path) -> bool:
    """Whether a path stands for one whole checkpoint of a model, by its name and what is in it. True where it cannot be
    looked at: to open it says why."""
    if _NO_WEIGHTS.search(path.name):
        return False
    try:
        return source_of(path) is not None and not _is_part(path)
    except OSError:
        return True


def _is_part(path: Path) -> bool:
    """Whether a path is named as one of several: `consolidated.00.pth` is whole where there is no other."""
    named = _SHARD.search if path.is_file() else _RANK_FOLDER.match
    if not named(path.name):
        return False
    total = re.search(r"-of-(\d+)", path.name)
    if total:
        return int(total[1]) > 1
    beside = [entry for entry in path.parent.glob(f"*{path.suffix}") if not _NO_WEIGHTS.search(entry.name)]
    return sum(named(entry.name) is not None for entry in beside) > 1


def open_checkpoint(path: Path) -> Checkpoint:
    """What is saved at a path, without its data. Raises ValueError, one line; nothing that a file holds is run."""
    source = source_of(path)
    if source is None:
        raise ValueError(f"expected a checkpoint at {str(path)!r}, found {_instead(path)}")
    part = next((each for each in (source.path, source.path.parent) if _is_part(each)), None)
    if part is not None:
        raise ValueError(
            f"expected a whole checkpoint, found {str(part)!r}, one part of several; "
            f"give its index ({_INDEX}) or directory, or merge the parts into one state dict"
        )
    config = _config(source.path if source.kind == "dcp" else source.path.parent, path)
    if source.kind == "index":
        tensors, files, read = _sharded(source.path)
    elif source.kind == "dcp":
        tensors, files, read = dcp.open_dcp(source.path)
    else:
        tensors, read = weight_files.open_file(source.path)
        files = (source.path,)
    return Checkpoint(path, tensors, config, files, read)


def _instead(path: Path) -> str:
    if not path.exists():
        return "nothing; check the path"
    if path.is_file():
        return f"a file of another kind; one of {', '.join(weight_files.KINDS)} or an index ({_INDEX}) is read"
    if not path.is_dir():
        return "neither a file nor a directory; give a weights file"
    inside = [each for each in sorted(path.iterdir()) if each.is_dir() or each.suffix.lower() in weight_files.KINDS]
    part = next(filter(_is_part, inside), None)
    if part is not None:
        return f"parts without the index that names them ({part.name}); restore {_INDEX}, or merge them"
    return "a directory without weights; give a weights file, or the directory that holds it"


def _sharded(index: Path) -> tuple[dict[str, Entry], tuple[Path, ...], Read]:
    """Shards beside an index: every file that it names must be a plain name in its own directory."""
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"expected a weight_map of names in {str(index)!r}, found none; restore the index")
    for name in set(names.values()):
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise ValueError(
                f"expected plain file names in {str(index)!r}, found {name[:80]!r}; nothing outside it is read"
            )
        if Path(name).suffix.lower() not in weight_files.KINDS:
            raise ValueError(
                f"expected shards ({', '.join(weight_files.KINDS)}) in {str(index)!r}, found {name[:80]!r}; "
                "restore the index"
            )
    missing = sorted(name for name in set(names.values()) if not (index.parent / name).is_file())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"expected the shards that {str(index)!r} names, found no {missing[0]!r}{more}; fetch them")
    shards = {name: weight_files.open_file(index.parent / name) for name in sorted(set(names.values()))}
    tensors = {}
    for tensor, name in names.items():
        if tensor not in shards[name][0]:
            raise ValueError(f"expected {tensor!r} in {name!r} as {index.name} says, found it not; fetch it again")
        tensors[tensor] = shards[name][0][tensor]

    def read(wanted: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in {names[tensor]: None for tensor in wanted}:
            found |= shards[name][1]([tensor for tensor in wanted if names[tensor] == name])
        return found

    return tensors, (index, *(index.parent / name for name in shards)), read


def _config(*places: Path) -> dict[str, Any]:
    for place in places:
        for name in ("config.json", "params.json"):
            if (place / name).is_file():
                return _json(place / name)
    return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > INDEX_LIMIT:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:120]
        raise ValueError(f"expected JSON in {str(path)!r}, found: {text}; restore the file") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {str(path)!r}, found {type(content).__name__}; restore the file")
    return content
