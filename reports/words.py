"""What the page says beside its charts. True for every run: what a number means, and what it does not."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    title: str
    text: str
    metrics: tuple[str, ...]


GROUPS = (
    Group(
        "The signature of collapse",
        "Attention fails when many heads turn sparse and low-rank together, under logits spread wide. One of "
        "the three alone is common in healthy models: a head that copies the previous token is sharp and fine.",
        ("entropy_ratio", "qk_rank_ratio", "spread_ratio"),
    ),
    Group(
        "How sharp attention is",
        "What a head's softmax makes of its logits.",
        (
            "logit_max", "logit_spread", "entropy", "saturated_rows", "softmax_gradient", "tied_rows",
            "forecast_sharpness",
        ),
    ),
    Group(
        "Spectrum of the query-key weights",
        "How many directions W_qᵀ W_k of a head really uses, from the weights alone. With QK-norm the raw product "
        "concentrates in healthy runs too, because it does not see the norm: read it together with the entropy.",
        (
            "qk_rank", "qk_directions_90", "qk_energy_top1", "qk_energy_top10", "qk_sigma_max",
            "wq_sigma_max", "wk_sigma_max", "qk_sigma_bound", "layer_energy_top10", "layer_directions_90",
        ),
    ),
    Group(
        "What one step does to the weights",
        "How far an optimizer step moves W_qᵀ W_k, and in how many directions.",
        ("update_ratio", "update_rank"),
    ),
    Group(
        "Where attention rests",
        "Sinks are normal: in most language models the first token holds much of the mass of many heads. A level means "
        "little; many heads losing or gaining sinks at once is news.",
        ("first_key_mass", "sink_mass", "map_rank"),
    ),
    Group(
        "Norms, bounds and faults",
        "What the logits are made of, and what they may not pass.",
        (
            "query_norm_max", "key_norm_max", "outlier_share", "qk_clip_factor", "logit_bound", "bound_use",
            "nonfinite", "weights_nonfinite", "wq_norm", "wk_norm", "q_gain_max", "k_gain_max",
        ),
    ),
)  # fmt: skip

READING = {
    "entropy_ratio": "1 is uniform attention, 0 one key a row. Low is an alarm only together with a low rank.",
    "spread_ratio": "1 is just enough for one key to take 99 % of a row. Healthy heads lie around 1 to 2.",
    "saturated_rows": "Rows that give one key more than 99 %. They pass next to no gradient to queries and keys.",
    "softmax_gradient": "How much gradient the softmax lets through; at 0 the head can no longer learn.",
    "logit_max": "Above 100 is no danger by itself. Near 1,000 losses begin to suffer, above 10,000 runs diverged.",
    "logit_spread": "Largest minus smallest logit of a row: what sharpness is made of.",
    "entropy": "In nats, not divided by its maximum: depends on the context length. Compare the ratio instead.",
    "qk_rank_ratio": "1 is as spread as random weights of this shape. Without QK-norm healthy "
    "trained heads lie mostly above 0.5; with it the raw product concentrates in healthy runs too.",
    "qk_rank": "Effective number of directions, at most the head size.",
    "qk_directions_90": "Directions that hold 90 % of the energy. Only comparable between heads of one size.",
    "qk_energy_top1": "Share of the energy in the strongest direction. Rises in a collapse, and under QK-norm.",
    "qk_energy_top10": "Share of the energy in the ten strongest directions. High by construction in small heads.",
    "qk_sigma_max": "Largest singular value of the product: grows before the logits do.",
    "wq_sigma_max": "Spectral norm of the query weights.",
    "wk_sigma_max": "Spectral norm of the key weights.",
    "layer_energy_top10": "The whole layer's product, all heads together. For the record; no rule should use it.",
    "layer_directions_90": "The whole layer's product, all heads together. For the record; no rule should use it.",
    "first_key_mass": "Mass on the first token. Heads above 0.5 are sinks and do not count as collapsed.",
    "sink_mass": "Mass on the most attended key, wherever it stands.",
    "map_rank": "Effective rank of the map without its sink. A healthy sink head may have a rank near 0.",
    "query_norm_max": "Longest query. With the longest key and the scale it bounds the logits.",
    "key_norm_max": "Longest key.",
    "logit_bound": "With a query-key norm: the logit that the norm's gains allow.",
    "bound_use": "Share of that bound in use. Near 1 the gains, not the weights, decide how sharp a head can be.",
    "nonfinite": "NaN or infinite logits. Any at all is a fault.",
}

UNIT_INTERVAL = frozenset(
    {
        "entropy_ratio", "saturated_rows", "softmax_gradient", "qk_energy_top1", "qk_energy_top10",
        "layer_energy_top10", "first_key_mass", "sink_mass", "tied_rows", "outlier_share", "forecast_sharpness",
    }
)  # fmt: skip
"""Metrics that live in [0, 1]: their axis is always the whole of it."""
