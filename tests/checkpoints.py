"""Checkpoints made for the tests: one small state dict in every format, and the reference of its spectra."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

LAYERS, WIDTH, HEADS, KV_HEADS, D = 3, 24, 4, 2, 6


def weights(seed: int = 0, layers: int = LAYERS) -> dict[str, Tensor]:
    """A decoder's attention with grouped queries, and something beside it."""
    generator = torch.Generator().manual_seed(seed)
    state = {"model.embed_tokens.weight": torch.randn(10, WIDTH, generator=generator)}
    for layer in range(layers):
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weight = torch.randn(heads * D, WIDTH, generator=generator) * WIDTH**-0.5
            state[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = weight
    return state


def config(path: Path, **more: object) -> None:
    facts = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, **more}
    (path / "config.json").write_text(json.dumps(facts))


def reference(w_q: Tensor, w_k: Tensor, heads: int, kv_heads: int) -> dict[str, NDArray[np.float64]]:
    """Spectra by a plain float64 singular value decomposition of each head's `W_q^T W_k`, formed as it stands."""
    q, k = (w.detach().double().numpy().reshape(n, -1, w.shape[1]) for w, n in ((w_q, heads), (w_k, kv_heads)))
    rows: dict[str, list[float]] = {name: [] for name in ("qk_sigma_max", "qk_energy_top10", "qk_rank", "wq_sigma_max")}
    for head in range(heads):
        sigma = np.linalg.svd(q[head].T @ k[head * kv_heads // heads], compute_uv=False)[: q.shape[1]]
        share = sigma**2 / (sigma**2).sum()
        rows["qk_sigma_max"].append(sigma[0])
        rows["qk_energy_top10"].append(share[:10].sum())
        rows["qk_rank"].append(np.exp(-(share[share > 0] * np.log(share[share > 0])).sum()))
        rows["wq_sigma_max"].append(np.linalg.svd(q[head], compute_uv=False)[0])
    return {name: np.array(row) for name, row in rows.items()}


def save_sharded(path: Path, state: Mapping[str, Tensor], shards: int = 2) -> None:
    """Shards with an index, as Hugging Face writes them."""
    names, held = list(state), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[number::shards]}
        save_file(part, path / file)
        held |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))


def save_distributed(path: Path, state: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(dict(state), checkpoint_id=path)


def save(kind: str, folder: Path, state: Mapping[str, Tensor]) -> Path:
    """The state in one of the formats, with a config.json; the path to scan."""
    folder.mkdir(parents=True)
    config(folder)
    match kind:
        case "safetensors":
            save_file(dict(state), folder / "model.safetensors")
            return folder / "model.safetensors"
        case "directory":
            save_file(dict(state), folder / "model.safetensors")
        case "sharded":
            save_sharded(folder, state)
        case "torch":
            torch.save(dict(state), folder / "weights.pt")
            return folder / "weights.pt"
        case "legacy":
            torch.save(dict(state), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        case "trainer":
            steps = {i: {"exp_avg": torch.ones(4, 4)} for i in range(2)}
            torch.save({"model": dict(state), "optimizer": {"state": steps}, "step": 7}, folder / "ckpt.pth")
        case "lightning":
            wrapped = {f"_orig_mod.{name}": x for name, x in state.items()}
            torch.save({"state_dict": wrapped, "epoch": 1, "optimizer_states": [{"state": {}}]}, folder / "last.ckpt")
        case "distributed":
            save_distributed(folder, state)
    return folder


FORMATS = ("safetensors", "directory", "sharded", "torch", "legacy", "trainer", "lightning", "distributed")
