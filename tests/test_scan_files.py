"""Reading checkpoints: every format gives the same tensors; what is damaged or made to harm is refused in a line."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests import checkpoints
from tests.checkpoints import FORMATS, HEADS, KV_HEADS, reference, save, weights

from attnwatch.hooks.checkpoints import is_checkpoint, open_checkpoint
from attnwatch.monitor.cli import main
from attnwatch.monitor.scan import scan
from attnwatch.monitor.steps import Step, find_steps


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """They are those of a plain SVD of what was saved, head by head."""
    state = weights()
    found = scan([Step(0, save(kind, tmp_path / "saved", state), "order")]).checkpoints[0]
    assert found.sample.layers == tuple(f"model.layers.{n}.self_attn" for n in range(3))
    assert {layer.state for layer in found.coverage} == {"verified"}
    for row, layer in enumerate(found.sample.layers):
        w_q, w_k = (state[f"{layer}.{side}_proj.weight"] for side in "qk")
        for name, expected in reference(w_q, w_k, HEADS, KV_HEADS).items():
            assert found.sample[name][row] == pytest.approx(expected, rel=2e-6), name


def test_a_distributed_checkpoint_of_several_pieces_is_put_together(tmp_path: Path) -> None:
    """A tensor saved as two halves, as two ranks do, is read whole."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    state = weights()
    checkpoints.save_distributed(tmp_path / "dcp", state)
    # The writer of one process makes one piece a tensor; cut the description of one of them in two by hand.
    with open(tmp_path / "dcp" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    halves = state[name].chunk(2)
    checkpoints.save_distributed(tmp_path / "halves", {"a": halves[0].contiguous(), "b": halves[1].contiguous()})
    with open(tmp_path / "halves" / ".metadata", "rb") as file:
        pieces = pickle.load(file)
    (tmp_path / "halves" / "__0_0.distcp").rename(tmp_path / "dcp" / "__9_0.distcp")
    rows, columns = halves[0].shape
    chunks = [ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((rows, columns))) for at in (0, rows)]
    whole = TensorStorageMetadata(TensorProperties(dtype=torch.float32), state[name].shape, chunks)
    metadata.state_dict_metadata[name] = whole
    metadata.storage_data = {index: x for index, x in metadata.storage_data.items() if index.fqn != name}
    for old, info in pieces.storage_data.items():
        index = type(old)(name, torch.Size((0 if old.fqn == "a" else rows, 0)), 0 if old.fqn == "a" else 1)
        metadata.storage_data[index] = type(info)("__9_0.distcp", info.offset, info.length)
    with open(tmp_path / "dcp" / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    assert torch.equal(open_checkpoint(tmp_path / "dcp").read([name])[name], state[name])


def _deepspeed(folder: Path) -> None:
    torch.save({"module": weights(), "ds_version": "0.17"}, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def _megatron(folder: Path, ranks: int = 1) -> Path:
    """Model, optimizer and random state of a rank in one file."""
    for rank in range(ranks):
        place = folder / "iter_0000500" / f"mp_rank_{rank:02}"
        place.mkdir(parents=True)
        torch.save({"model": weights(), "iteration": 500}, place / "model_optim_rng.pt")
        torch.save({"state": {"q_proj.weight": torch.ones(4, 4)}}, place / "distrib_optim.pt")
    return folder / "iter_0000500"


def _sharded_trainer(folder: Path) -> None:
    """Hugging Face's Trainer with FSDP: the model and the optimizer in directories of their own."""
    checkpoints.save_distributed(folder / "pytorch_model_fsdp_0", weights())
    checkpoints.save_distributed(folder / "optimizer_0", {"state.q_proj.weight": torch.ones(4, 4)})


def _llama(folder: Path) -> None:
    torch.save(weights(), folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps({"dim": 24, "n_heads": 4, "n_kv_heads": 2}))


def _lone_shard(folder: Path) -> None:
    save_file(weights(), folder / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize("made", [_deepspeed, _sharded_trainer, _llama, _lone_shard])
def test_directories_of_trainers_are_known(made: Callable[[Path], None], tmp_path: Path) -> None:
    """What each leaves beside the model is left alone."""
    made(tmp_path)
    found = scan([Step(0, tmp_path, "order")], heads=HEADS).checkpoints[0]
    assert found.sample.layers == tuple(f"model.layers.{n}.self_attn" for n in range(3))
    assert {(layer.heads, layer.kv_heads) for layer in found.coverage} == {(HEADS, KV_HEADS)}


def test_megatrons_iterations_are_steps(tmp_path: Path) -> None:
    """A directory of them, one of them, one rank's directory, and its file are the same weights."""
    iteration = _megatron(tmp_path)
    rank = iteration / "mp_rank_00"
    for path, number in ((tmp_path, 500), (iteration, 500), (rank, 0), (rank / "model_optim_rng.pt", 0)):
        (step,) = find_steps([path], is_checkpoint)
        assert step.number == number
        assert len(scan([step], heads=HEADS).checkpoints[0].sample.layers) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "distributed"])
def test_every_float_type_is_read_as_it_was_rounded(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: x.to(dtype) for name, x in weights(layers=1).items()}
    state["model.layers.0.self_attn.k_proj.weight"] = weights(layers=1)["model.layers.0.self_attn.k_proj.weight"].half()
    found = scan([Step(0, save(kind, tmp_path / "saved", state), "order")]).checkpoints[0].sample
    w_q, w_k = (state[f"model.layers.0.self_attn.{side}_proj.weight"].double() for side in "qk")
    assert found["qk_rank"][0] == pytest.approx(reference(w_q, w_k, HEADS, KV_HEADS)["qk_rank"], rel=2e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


class Bomb:
    """What a hostile pickle does: here it would leave a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.mark,)


def _payload(folder: Path) -> Path:
    torch.save({"model": weights(), "args": Bomb(folder / "ran")}, folder / "x.pt")
    return folder / "x.pt"


def _legacy_payload(folder: Path) -> Path:
    torch.save({"args": Bomb(folder / "ran")}, folder / "x.bin", _use_new_zipfile_serialization=False)
    return folder / "x.bin"


def _plain_pickle(folder: Path) -> Path:
    (folder / "x.ckpt").write_bytes(pickle.dumps(Bomb(folder / "ran")))
    return folder / "x.ckpt"


def _metadata_payload(folder: Path) -> Path:
    checkpoints.save_distributed(folder / "dcp", weights())
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(folder / "ran")))
    return folder / "dcp"


def _data_payload(folder: Path) -> Path:
    """A distributed checkpoint of honest metadata, in whose data a tensor is none."""
    checkpoints.save_distributed(folder / "dcp", weights())
    torch.save((Bomb(folder / "ran"), torch.zeros(10_000)), folder / "dcp" / "__9_0.distcp")
    with open(folder / "dcp" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    for index, info in metadata.storage_data.items():
        size = (folder / "dcp" / "__9_0.distcp").stat().st_size
        metadata.storage_data[index] = type(info)("__9_0.distcp", 0, size)
    with open(folder / "dcp" / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    return folder / "dcp"


def _metadata_path(folder: Path) -> Path:
    """A distributed checkpoint that says that its data lie elsewhere."""
    checkpoints.save_distributed(folder / "dcp", weights())
    text = (folder / "dcp" / ".metadata").read_bytes()
    (folder / "dcp" / ".metadata").write_bytes(text.replace(b"__0_0.distcp", b"../../passwd"))
    return folder / "dcp"


def _metadata_size(size: tuple[float, ...]) -> Callable[[Path], Path]:
    """A distributed checkpoint whose metadata say that of a tensor."""

    def make(folder: Path) -> Path:
        checkpoints.save_distributed(folder / "dcp", weights())
        with open(folder / "dcp" / ".metadata", "rb") as file:
            metadata = pickle.load(file)
        metadata.state_dict_metadata["model.embed_tokens.weight"].size = size
        with open(folder / "dcp" / ".metadata", "wb") as file:
            pickle.dump(metadata, file)
        return folder / "dcp"

    return make


def _missing_piece(folder: Path) -> Path:
    checkpoints.save_distributed(folder / "dcp", weights())
    (folder / "dcp" / "__0_0.distcp").unlink()
    return folder / "dcp"


def _cut(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = save(kind, folder / "saved", weights())
        file = next(x for x in (path, *path.iterdir()) if x.is_file()) if path.is_dir() else path
        file = path / "__0_0.distcp" if kind == "distributed" else file
        file.write_bytes(file.read_bytes()[:-600])
        return path

    return make


def _safetensors(header: bytes, length: int | None = None) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        size = len(header) if length is None else length
        (folder / "x.safetensors").write_bytes(struct.pack("<Q", size) + header + bytes(64))
        return folder / "x.safetensors"

    return make


def _overlap() -> bytes:
    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
    return json.dumps({"a.q_proj.weight": entry, "a.k_proj.weight": {**entry, "data_offsets": [16, 48]}}).encode()


def _index(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save_file({"a.q_proj.weight": torch.ones(4, 4)}, folder / "here.safetensors")
        names = {"a.q_proj.weight": "here.safetensors", "a.k_proj.weight": name}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return folder

    return make


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "x.pt")
    return folder / "x.pt"


def _expanded(folder: Path) -> Path:
    """One number that claims to be a matrix of 10^12."""
    big = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save({"attn.q_proj.weight": big, "attn.k_proj.weight": big}, folder / "x.pt")
    return folder / "x.pt"


def _no_attention(folder: Path) -> Path:
    save_file({"fc.weight": torch.ones(4, 4)}, folder / "x.safetensors")
    return folder / "x.safetensors"


def _empty_folder(folder: Path) -> Path:
    (folder / "notes.txt").write_text("nothing")
    return folder


def _parts(folder: Path) -> Path:
    for part in range(2):
        torch.save(weights(), folder / f"consolidated.{part:02d}.pth")
    return folder


def _list(folder: Path) -> Path:
    torch.save([torch.ones(2, 2)], folder / "x.pt")
    return folder / "x.pt"


def _meta(folder: Path) -> Path:
    on_meta = {name: x.to("meta") for name, x in weights().items()}
    torch.save(on_meta, folder / "x.pt")
    return folder / "x.pt"


def _empty_tensors(folder: Path) -> Path:
    torch.save({name: torch.empty(0) if "self_attn" in name else x for name, x in weights().items()}, folder / "x.pt")
    return folder / "x.pt"


def _pointer(folder: Path) -> Path:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4f\nsize 12345\n"
    (folder / "model.safetensors").write_text(text)
    return folder


def _bad_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("{" * 100_000)
    return folder


REFUSED = {
    "a payload beside the weights": (_payload, "a pickle that asks for"),
    "a payload in the old format": (_legacy_payload, "a pickle that asks for"),
    "a bare pickle": (_plain_pickle, "found a pickle"),
    "a payload as DCP metadata": (_metadata_payload, "nothing was run"),
    "a payload in DCP data": (_data_payload, "data that are a pickle that asks for"),
    "a DCP path that leads out": (_metadata_path, "leads out of the directory"),
    "a DCP tensor larger than its file": (_metadata_size((1 << 30, 1 << 20)), "of shape [1073741824, 1048576] in"),
    "a DCP tensor of less than nothing": (_metadata_size((-8, -8)), "of shape [-8, -8] in"),
    "a DCP tensor of half rows": (_metadata_size((8.5, 8)), "expected a distributed checkpoint in"),
    "a DCP without its data": (_missing_piece, "no '__0_0.distcp'"),
    "a cut DCP": (_cut("distributed"), "shorter than it says"),
    "a cut safetensors": (_cut("safetensors"), "expected a whole safetensors file"),
    "a cut torch file": (_cut("torch"), "expected a whole torch.save file"),
    "a cut old torch file": (_cut("legacy"), "expected"),
    "a huge header": (_safetensors(b"{}", 1 << 60), "expected a whole safetensors file"),
    "a header longer than the file": (_safetensors(b"{}", 4096), "expected a whole safetensors file"),
    "overlapping tensors": (_safetensors(_overlap()), "expected a whole safetensors file"),
    "a header that is no JSON": (_safetensors(b"{nonsense"), "expected a whole safetensors file"),
    "an index that climbs": (_index("../../../etc/passwd"), "expected plain file names"),
    "an absolute index": (_index("/etc/passwd"), "expected plain file names"),
    "an index to a folder": (_index(".."), "expected plain file names"),
    "an index to itself": (_index("model.safetensors.index.json"), "expected shards (.safetensors"),
    "an index to another kind": (_index("notes.txt"), "expected shards (.safetensors"),
    "a pipe": (_pipe, "neither a file nor a directory"),
    "a missing shard": (_index("there.safetensors"), "found no 'there.safetensors'"),
    "a shard without its tensor": (_index("here.safetensors"), "expected 'a.k_proj.weight' in 'here.safetensors'"),
    "a broken index": (_bad_index, "expected JSON in"),
    "an expanded tensor": (_expanded, "4 bytes of them"),
    "no attention": (_no_attention, "found none among 1 tensors (fc.weight)"),
    "no checkpoint": (_empty_folder, "a directory without weights"),
    "nothing": (lambda folder: folder / "nowhere", "found nothing"),
    "another file": (lambda folder: Path(__file__), "a file of another kind"),
    "parts without an index": (_parts, "parts without the index that names them"),
    "ranks of Megatron": (lambda folder: _megatron(folder, 2), "parts without the index that names them (mp_rank_00)"),
    "one rank of two": (lambda folder: _megatron(folder, 2) / "mp_rank_01", "one part of several"),
    "a file of one rank of two": (
        lambda folder: _megatron(folder, 2) / "mp_rank_01" / "model_optim_rng.pt",
        "one part of several",
    ),
    "a pointer of Git LFS": (_pointer, "found a pointer of Git LFS to them; git lfs pull"),
    "a list": (_list, "a list, no state dict"),
    "meta tensors": (_meta, "no numbers: saved from the meta device"),
    "empty tensors": (_empty_tensors, "found shape [0], empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, a line that says what was found, and nothing was run."""
    make, expected = REFUSED[case]
    assert main(["scan", str(make(tmp_path)), "--heads", "4"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("attnwatch: expected")
    assert said.err.count("\n") == 1
    assert expected in said.err
    assert not (tmp_path / "ran").exists()
