"""Recipes that were made and run after the default rules were fixed: no line was chosen on them.

`bos_rope_*`, `copy_string*`, `recall*`, `maximum*`, `wide_long_*` and `copy_previous_*` are of families in which
earlier rules gave false alarms: those runs were known when the rules were chosen, these are other ones.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.detection.recipe import COLLAPSES, HEALTHY, OVERFLOWS, SPIKES, Knots
from benchmarks.detection.recipes import (
    COPY,
    HARD,
    IMAGES,
    SANE_IMAGES,
    SANE_MLP,
    SANE_TEXT,
    SINKS,
    TEXT,
    WITH_MLP,
    constant,
    jump,
    ramp,
)


def cosine(peak: float, steps: int, warm_up: int = 100) -> Knots:
    """Linear to the peak, then down to a tenth of it along a cosine, drawn as nine straight pieces."""
    tenths = (0.98, 0.91, 0.81, 0.69, 0.55, 0.41, 0.29, 0.19, 0.1)
    piece = (steps - warm_up) // len(tenths)
    return *ramp(peak, warm_up), *((warm_up + piece * n, peak * x) for n, x in enumerate(tenths, 1))


GEOMETRIC = ((0, 1e-4), (200, 1e-3), (400, 1e-2), (550, 0.05), (650, 0.2))
STAIRS = ((0, 1e-3), (50, 0.01), (200, 0.01), (201, 0.03), (350, 0.03), (351, 0.09), (500, 0.09), (501, 0.25))

COLLAPSING = (
    replace(HARD, name="depth_3", layers=3, seed=2),
    replace(HARD, name="depth_5", layers=5, seed=3),
    replace(HARD, name="depth_10", layers=10, seed=4),
    replace(HARD, name="depth_16", layers=16, seed=5),
    replace(HARD, name="head_24", width=96, seed=2, rate=ramp(0.12, 900)),
    replace(HARD, name="head_48", width=96, heads=2, layers=5, seed=3, rate=ramp(0.12, 900)),
    replace(HARD, name="head_12", width=48, seed=4),
    replace(HARD, name="head_16_of_128", width=128, heads=8, seed=5, rate=ramp(0.1, 1000)),
    replace(HARD, name="radam", optimizer="radam", seed=2),
    replace(HARD, name="adamax", optimizer="adamax", seed=3, rate=ramp(0.4, 800)),
    replace(HARD, name="adamw_strong_decay", optimizer="adamw", decay=0.3, seed=4),
    replace(HARD, name="ramp_cosine", rate=cosine(0.15, 700, 300), seed=2),
    replace(HARD, name="ramp_geometric", rate=GEOMETRIC, seed=3),
    replace(HARD, name="ramp_stairs", rate=STAIRS, seed=4),
    replace(HARD, name="qk_rate_20", rate=ramp(0.008, 800), qk_rate=20.0, seed=5),
    replace(HARD, name="rope_high", position="rope", seed=2),
    replace(HARD, name="rope_high_depth_8", position="rope", layers=8, seed=3),
    replace(HARD, name="alibi_high", position="alibi", seed=2),
    replace(HARD, name="grouped_high", kv_heads=2, seed=2),
    replace(HARD, name="single_key_head_high", kv_heads=1, layers=6, seed=3),
    replace(HARD, name="shared_rope_high", position="rope", shared=True, seed=4, reference="shared_rope_text"),
    replace(HARD, name="bos_high", data="started", seed=2),
    replace(HARD, name="prose_depth_6", data="prose", layers=6, seed=2, reference="sane_prose"),
    replace(WITH_MLP, name="mlp_depth_3_rope", layers=3, position="rope", seed=3),
    replace(WITH_MLP, name="mlp_depth_6", layers=6, seed=4),
    replace(WITH_MLP, name="mlp_4_wide", mlp=4, width=96, seed=5),
    replace(WITH_MLP, name="mlp_grouped", kv_heads=2, seed=6),
    replace(IMAGES, name="images_depth_3", layers=3, seed=2, rate=ramp(0.1, 1500), steps=700),
    replace(IMAGES, name="images_width_96", width=96, heads=3, seed=3, rate=ramp(0.1, 2000), steps=700),
    replace(IMAGES, name="images_mlp_depth_6", mlp=2, layers=6, seed=4),
    replace(TEXT, name="half_rope", label=OVERFLOWS, call="half", rate=ramp(0.3, 400), steps=400, seed=2),
    replace(COPY, name="copy_high", label=COLLAPSES, rate=ramp(0.15, 600), steps=600, reference="copy_previous_2"),
)

SOLVED = replace(
    SANE_MLP, mlp=4, layers=2, batch=32, optimizer="adamw", decay=0.01, clip=1.0, steps=1500, reference="",
    rate=cosine(3e-3, 1500, 200),
)  # fmt: skip
BOS_ROPE = replace(
    SOLVED, data="started", length=64, batch=16, layers=4, position="rope", shared=True, rate=cosine(0.01, 800, 200),
    steps=800,
)  # fmt: skip
LONG_WIDE = replace(SANE_TEXT, width=128, steps=1000, reference="")

HARD_NEGATIVES = (
    *(replace(BOS_ROPE, name=f"bos_rope_seed_{seed}", seed=seed) for seed in (11, 12, 13)),
    *(
        replace(SOLVED, name=f"copy_string_seed_{seed}", data="copy_string", position="rope", seed=seed)
        for seed in (11, 12, 13)
    ),
    *(
        replace(
            SOLVED, name=f"recall_seed_{seed}", data="recall", length=24, width=128, steps=1000,
            rate=cosine(2e-3, 1000, 200), seed=seed,
        )
        for seed in (11, 12)
    ),
    *(
        replace(SOLVED, name=f"maximum_seed_{seed}", data="maximum", length=16, steps=1200, seed=seed)
        for seed in (11, 12, 13)
    ),
)  # fmt: skip

SOUND_KINDS = (
    replace(SOLVED, name="copy_string_long", data="copy_string", rate=constant(3e-3), decay=0.0, steps=2500, seed=1),
    replace(SOLVED, name="copy_string_no_mlp", data="copy_string", mlp=0, position="rope", seed=2),
    *(replace(SOLVED, name=f"sort_string_seed_{seed}", data="sort_string", seed=seed) for seed in (1, 2)),
    *(replace(SOLVED, name=f"own_map_seed_{seed}", data="own_map", position="rope", seed=seed) for seed in (1, 2)),
    replace(SOLVED, name="own_map_no_mlp", data="own_map", mlp=0, length=64, batch=16, seed=3),
    replace(SOLVED, name="own_map_high", data="own_map", rate=cosine(0.01, 1500, 200), seed=4),
    replace(SOLVED, name="reverse", data="reverse", length=16, steps=1000, seed=1),
    replace(SOLVED, name="reverse_high", data="reverse", length=16, rate=cosine(0.01, 1000, 200), steps=1000, seed=2),
    replace(SANE_TEXT, name="alibi", position="alibi", reference="", seed=1),
    replace(SANE_TEXT, name="alibi_deep", position="alibi", layers=8, reference="", seed=2),
    replace(SANE_TEXT, name="grouped", kv_heads=2, reference="", seed=1),
    replace(SANE_MLP, name="grouped_rope_mlp", kv_heads=1, position="rope", reference="", seed=2, steps=800),
    replace(SANE_TEXT, name="shared_rope_text", position="rope", shared=True, reference="", steps=700),
    replace(SANE_TEXT, name="rope_long", position="rope", steps=1500, reference="", seed=1),
    replace(SANE_TEXT, name="rope_window", position="rope", window=8, reference="", seed=1),
    replace(SANE_IMAGES, name="images_long", mlp=2, layers=4, steps=1500, reference="", seed=1),
    replace(SANE_IMAGES, name="images_long_no_mlp", steps=1500, reference="", seed=2),
    replace(
        SANE_MLP, name="cosine_restart", steps=800, reference="", seed=1,
        rate=(*cosine(6e-3, 400, 50), *((400 + at, rate) for at, rate in cosine(6e-3, 400, 50))),
    ),
    *(replace(LONG_WIDE, name=f"wide_long_seed_{seed}", seed=seed) for seed in (2, 3)),
    replace(LONG_WIDE, name="wide_long_head_16", heads=8, seed=4),
    replace(TEXT, name="norm_rms_rope", norm="rms", position="rope", label=HEALTHY, reference="", seed=1),
    replace(TEXT, name="norm_layer_seed_1", norm="layer", label=HEALTHY, reference="", seed=1),
    replace(TEXT, name="norm_rms_across_hot_seed_1", norm="rms_across", rate=ramp(0.3, 800), label=HEALTHY,
            reference="", seed=1),
    replace(TEXT, name="norm_l2_grouped", norm="l2", kv_heads=2, label=HEALTHY, reference="", seed=2),
    *(replace(WITH_MLP, name=f"qwen3_high_seed_{seed}", call="qwen3", label=HEALTHY, reference="", seed=seed)
      for seed in (1, 2)),
    replace(SANE_MLP, name="jump_qwen3_seed_1", label=SPIKES, call="qwen3", rate=jump(3e-3, 0.1, 250), seed=1),
    replace(SANE_MLP, name="jump_rms_rope", label=SPIKES, norm="rms", position="rope", rate=jump(3e-3, 0.1, 250)),
    replace(SINKS, name="sinks_apart_seed_2", start="sinks_apart", seed=2),
    replace(SINKS, name="sinks_separators_seed_2", start="sinks_separators", seed=2),
    replace(COPY, name="copy_previous_3", layers=3, seed=4),
    replace(COPY, name="copy_previous_rope", position="rope", seed=5),
    replace(SANE_MLP, name="fine_tuned_rope", data="prose", before=500, position="rope", steps=300, reference=""),
)  # fmt: skip

HELD_OUT = tuple(replace(recipe, fresh=True) for recipe in (*COLLAPSING, *HARD_NEGATIVES, *SOUND_KINDS))
