"""The definitions of every number, as slow loops over float64: written from the definitions, not from the code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

RANK_ROWS = 1024


def logits_and_visibility(
    q: Tensor | None,
    k: Tensor | None,
    *,
    scale: float | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scores: Tensor | None = None,
) -> tuple[Array, NDArray[np.bool_]]:
    """`s` and `visible`, `[B, H, Tq, Tk]` each."""
    if scores is not None:
        s = scores.double().numpy()
        visible = ~(s <= max(-1e8, np.finfo(scores.numpy().dtype).min / 2))
    else:
        assert q is not None
        assert k is not None
        queries, keys = q.detach().double().numpy(), k.detach().double().numpy()
        heads, d = queries.shape[1], queries.shape[3]
        keys = keys[:, [h // (heads // keys.shape[1]) for h in range(heads)]]
        factor = np.full(heads, d**-0.5 if scale is None else np.asarray(scale, dtype=np.float64))
        s = factor[:, None, None] * np.einsum("bhid,bhjd->bhij", queries, keys)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        visible = np.ones(s.shape, dtype=bool)
    for i in range(s.shape[2]):
        for j in range(s.shape[3]):
            if (causal and j > i) or (window is not None and j <= i - window):
                visible[:, :, i, j] = False
    for added in (mask, bias):
        if added is None:
            continue
        values = np.broadcast_to(added.double().numpy() if added.is_floating_point() else added.numpy(), s.shape)
        if added.is_floating_point():
            visible &= ~(values <= float(_lowest(added)) / 2)
            s = s if scores is not None else s + values
        else:
            visible &= values
    return s, visible


def _lowest(tensor: Tensor) -> float:
    return float(
        {2: np.finfo(np.float16).min, 4: np.finfo(np.float32).min, 8: np.finfo(np.float64).min}[tensor.itemsize]
    )


def attention_statistics(
    q: Tensor | None,
    k: Tensor | None,
    *,
    sinks: Tensor | None = None,
    sequences: list[int] | None = None,
    rows: list[int] | None = None,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    **call: Any,
) -> dict[str, list[float]]:
    """Every statistic, one value a head, of these rows of these sequences."""
    given = call.get("scores") if q is None else q
    assert given is not None
    dtype = given.dtype if dtype is None else dtype
    with np.errstate(invalid="ignore", over="ignore"):
        s, visible = logits_and_visibility(q, k, **call)
    batch, heads, queries, _ = s.shape
    sequences = list(range(batch)) if sequences is None else sequences
    rows = list(range(queries)) if rows is None else rows
    by_head: list[dict[str, float]] = []
    for h in range(heads):
        sink = None if sinks is None else float(sinks[h])
        parts = [_sequence(s[b, h], visible[b, h], rows, sink) for b in sequences]
        for b, part in zip(sequences, parts, strict=True):
            pair = None
            if q is not None and k is not None:
                pair = tuple(x.detach().double().numpy() for x in (q[b, h], k[b, h // (heads // k.shape[1])]))
            part.update(_top_keys(s[b, h], visible[b, h], rows, context, dtype, pair))
        maxima, sums = {}, {}
        for b, part in zip(sequences, parts, strict=True):
            part["query_norm_max"] = part["key_norm_max"] = -np.inf
            for i in rows:
                if q is not None and visible[b, h, i].any():
                    norm = np.linalg.norm(q[b, h, i].detach().double().numpy())
                    part["query_norm_max"] = np.fmax(part["query_norm_max"], norm)
            for j in range(s.shape[3]):
                if k is not None and visible[b, h, rows, j].any():
                    norm = np.linalg.norm(k[b, h // (heads // k.shape[1]), j].detach().double().numpy())
                    part["key_norm_max"] = np.fmax(part["key_norm_max"], norm)
        for name in ("logit_max", "query_norm_max", "key_norm_max"):
            maxima[name] = max(float(part[name]) for part in parts)
            maxima[name] = np.nan if maxima[name] == -np.inf else maxima[name]
        sums["nonfinite"] = sum(part["nonfinite"] for part in parts)
        means = {}
        for name in parts[0]:
            if name in maxima or name in sums or name in ("rows", "outlier_rows"):
                continue
            counted = "outlier_rows" if name == "outlier_share" else "rows"
            known = [(part[name], part[counted]) for part in parts if part[counted] and not np.isnan(part[name])]
            weight = sum(w for _, w in known)
            means[name] = sum(v * w for v, w in known) / weight if weight else np.nan
        clip = {"qk_clip_factor": 1.0 if maxima["logit_max"] <= 100 else 100 / maxima["logit_max"]}
        by_head.append({**means, **maxima, **sums, **clip})
    return {name: [float(head[name]) for head in by_head] for name in by_head[0]}


def _full(s: Array, visible: NDArray[np.bool_], rows: list[int]) -> list[int]:
    """The full rows whose logits are all finite."""
    count = visible.sum(1)
    return [i for i in rows if count[i] >= max(2, count.max() / 2) and np.isfinite(s[i, visible[i]]).all()]


def _top_keys(
    s: Array,
    visible: NDArray[np.bool_],
    rows: list[int],
    context: int | None,
    dtype: torch.dtype,
    pair: tuple[Array, ...] | None,
) -> dict[str, float]:
    """What the largest logits of the full rows tell; `pair`: q `[Tq, d]` and k `[Tk, d]`."""
    sharp, tied, outlier = [], [], []
    for i in _full(s, visible, rows):
        row = s[i, visible[i]]
        sharp.append(np.nan if context is None else min(1.0, np.exp(min(row.max() - row.min(), 700)) / context))
        rounded = torch.tensor(row).float().to(dtype)
        tied.append(int((rounded == rounded.max()).sum()) > 1)  # the maximum is there more than once
        if pair is not None:
            top = np.flatnonzero(visible[i])[row.argmax()]
            sizes = [abs(x * y) for x, y in zip(pair[0][i], pair[1][top], strict=True)]
            outlier += [max(sizes) / sum(sizes)] if sum(sizes) else []
    means = [float(np.mean(values)) if values else np.nan for values in (sharp, tied, outlier)]
    names = ("forecast_sharpness", "tied_rows", "outlier_share")
    return {**dict(zip(names, means, strict=True)), "outlier_rows": float(len(outlier))}


def _sequence(s: Array, visible: NDArray[np.bool_], rows: list[int], sink: float | None) -> dict[str, float]:
    """One sequence and head: means over its used rows, their number, maxima and counts."""
    count = visible.sum(1)
    seen = [s[i, visible[i]] for i in rows]
    every = np.concatenate(seen) if seen else np.empty(0)
    bad = np.isnan(every) | (every == np.inf)
    numbers = every[~np.isnan(every)]
    full = _full(s, visible, rows)
    out = {
        "logit_max": float(numbers.max()) if len(numbers) else -np.inf,
        "nonfinite": float(bad.sum()),
        "rows": float(len(full)),
    }
    collected: dict[str, list[float]] = {
        name: []
        for name in ("logit_spread", "spread_ratio", "entropy", "entropy_ratio", "saturated_rows", "softmax_gradient")
    }
    p = np.zeros(s.shape)
    dropped = np.zeros(len(s))
    for i in full:
        row, n = s[i, visible[i]], int(count[i])
        terms = row if sink is None else np.append(row, sink)
        share = np.exp(terms - terms.max())
        share /= share.sum()
        entropy = -sum(x * np.log(x) for x in share if x > 0)
        kept = share[:n]
        p[i, visible[i]] = kept
        dropped[i] = 0.0 if sink is None else share[n]
        spread = row.max() - row.min()
        collected["logit_spread"].append(spread)
        collected["spread_ratio"].append(spread / (np.log(n - 1) + np.log(99)))
        collected["entropy"].append(entropy)
        collected["entropy_ratio"].append(entropy / np.log(n if sink is None else n + 1))
        collected["saturated_rows"].append(float(kept.max() > 0.99))
        collected["softmax_gradient"].append((1 - (kept**2).sum()) * n / (n - 1))
    for name, values in collected.items():
        out[name] = float(np.mean(values)) if values else np.nan
    out["sink_mass"] = out["first_key_mass"] = out["map_rank"] = np.nan
    if not full:
        return out
    alpha = {}
    for j in range(s.shape[1]):
        sees = [i for i in full if visible[i, j]]
        if len(sees) >= len(full) / 2 and sees:
            alpha[j] = np.mean([p[i, j] for i in sees])
    first = int(np.argmax(visible.any(0)))
    sees = [i for i in full if visible[i, first]]
    out["first_key_mass"] = float(np.mean([p[i, first] for i in sees])) if sees else 0.0
    if alpha:
        top = max(alpha, key=lambda j: alpha[j])
        out["sink_mass"] = max(float(alpha[top]), float(dropped[full].mean()))
        stride = -(-len(rows) // RANK_ROWS)
        kept_rows = [i for i in rows[::stride] if i in full]
        out["map_rank"] = map_rank(p[kept_rows], top)
    return out


def map_rank(p: Array, sink: int) -> float:
    """Effective rank of full rows `[R, Tk]` without the sink's column; rows left with next to nothing are dropped."""
    rest = np.delete(p, sink, axis=1)
    rest = rest[rest.sum(1) >= 1e-6]
    if not rest.size:
        return 0.0
    energy = np.linalg.svd(rest / rest.sum(1, keepdims=True), compute_uv=False) ** 2
    return effective_rank(energy)


def effective_rank(energy: Array) -> float:
    shares = energy[energy > 0] / energy.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def spectrum(w_q: Array, w_k: Array) -> dict[str, list[float]]:
    """`w_q [H, d, in_q]`, `w_k [Hk, d, in_k]`: the singular values of every head's whole product, formed outright."""
    heads, d, in_q = w_q.shape
    in_k = w_k.shape[2]
    group = heads // w_k.shape[0]
    w_k = w_k.repeat(group, axis=0)
    layer = np.linalg.svd(w_q.reshape(heads * d, in_q).T @ w_k.reshape(heads * d, in_k), compute_uv=False)
    out: dict[str, list[float]] = {}
    for h in range(heads):
        sigma = np.linalg.svd(w_q[h].T @ w_k[h], compute_uv=False)
        energy = sigma**2
        rank = effective_rank(energy)
        values = {
            "qk_sigma_max": sigma[0],
            "qk_energy_top1": energy[0] / energy.sum(),
            "qk_energy_top10": energy[:10].sum() / energy.sum(),
            "qk_directions_90": _directions(energy),
            "qk_rank": rank,
            "qk_rank_ratio": rank / (d * (1 + d / in_q) ** -0.6 * (1 + d / in_k) ** -0.6),
            "wq_sigma_max": np.linalg.norm(w_q[h], 2),
            "wk_sigma_max": np.linalg.norm(w_k[h], 2),
            "qk_sigma_bound": np.linalg.norm(w_q[h], 2) * np.linalg.norm(w_k[h], 2),
            "layer_energy_top10": (layer[:10] ** 2).sum() / (layer**2).sum(),
            "layer_directions_90": _directions(layer**2),
        }
        for name, value in values.items():
            out.setdefault(name, []).append(float(value))
    return out


def _directions(energy: Array) -> int:
    return next(i + 1 for i in range(len(energy)) if energy[: i + 1].sum() >= 0.9 * energy.sum())


def update(w_q: Array, w_k: Array, new_q: Array, new_k: Array) -> dict[str, list[float]]:
    """Weights `[H, d, in_q]`, `[Hk, d, in_k]` before and after a step: every product and change formed outright."""
    group = len(w_q) // len(w_k)
    out: dict[str, list[float]] = {"update_ratio": [], "update_rank": []}
    for h in range(len(w_q)):
        q, k, q2, k2 = w_q[h], w_k[h // group], new_q[h], new_k[h // group]
        out["update_ratio"].append(float(np.linalg.norm(q2.T @ k2 - q.T @ k, 2) / np.linalg.norm(q.T @ k, 2)))
        first = (q2 - q).T @ k + q.T @ (k2 - k)
        out["update_rank"].append(effective_rank(np.linalg.svd(first, compute_uv=False) ** 2))
    return out
