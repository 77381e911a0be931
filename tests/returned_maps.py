"""The attention maps that a model itself returns, and what they say of entropy and sink mass: slow, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def returned(model: Any, batch: Mapping[str, Tensor], layers: Sequence[str]) -> dict[str, Tensor]:
    """Maps `[B, H, Tq, Tk]` of a Hugging Face model (eager), by layer; `layers` as they are called one by one."""
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    if not hasattr(out, "encoder_attentions"):
        return dict(zip(layers, out.attentions, strict=True))
    cross = [name for name in layers if "encoder_attn" in name or "EncDecAttention" in name]
    encoder = [name for name in layers if "decoder" not in name]
    decoder = [name for name in layers if name not in cross + encoder]
    return {
        **dict(zip(encoder, out.encoder_attentions, strict=True)),
        **dict(zip(decoder, out.decoder_attentions, strict=True)),
        **dict(zip(cross, out.cross_attentions, strict=True)),
    }


def of_maps(maps: Tensor) -> tuple[Array, Array]:
    """Entropy and sink mass `[H]` of `[B, H, Tq, Tk]`. What a row lacks to 1 went to a learned sink."""
    p = maps.double().numpy()
    found = [[_of_map(p[b, h]) for b in range(p.shape[0])] for h in range(p.shape[1])]
    entropy = [np.concatenate([entropies for entropies, _ in head]).mean() for head in found]
    sink = []
    for head in found:
        known = [(len(entropies), mass) for entropies, mass in head if not np.isnan(mass)]
        sink.append(np.average([m for _, m in known], weights=[n for n, _ in known]) if known else np.nan)
    return np.array(entropy), np.array(sink)


def _of_map(p: Array) -> tuple[Array, float]:
    """Entropy of every full row, and the sink mass, of one `[Tq, Tk]`."""
    visible = p > 0
    count = visible.sum(1)
    full = np.flatnonzero(count >= max(2, count.max() / 2))
    dropped = 1 - p.sum(1)
    dropped[dropped < 1e-6] = 0
    entropies = [-sum(x * np.log(x) for x in (*p[i], dropped[i]) if x > 0) for i in full]
    masses = []
    for j in range(p.shape[1]):
        sees = [i for i in full if visible[i, j]]
        if sees and len(sees) >= len(full) / 2:
            masses.append(p[sees, j].mean())
    # Undefined where half of the rows see no key together: narrow windows.
    return np.array(entropies), max(*masses, float(dropped[full].mean())) if masses else np.nan
