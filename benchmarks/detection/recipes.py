"""Every recipe. Each is close to a common base and named after what it does differently.

Too high a rate for models without a query-key norm collapses their attention: attention-only models then diverge,
those with feed-forward layers only learn worse. What the same rate does to models with a norm, and what healthy
attention can look like, are the negatives.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.detection.recipe import (
    COLLAPSES,
    HEALTHY,
    OVERFLOWS,
    SINKS_LOST,
    SPIKES,
    UNIFORM,
    Knots,
    Recipe,
)


def ramp(peak: float, steps: int) -> Knots:
    """Linear to the peak at `steps`, then constant."""
    return (0, peak / steps), (steps, peak)


def constant(rate: float, warm_up: int = 50) -> Knots:
    return ramp(rate, warm_up)


def jump(before: float, after: float, at: int) -> Knots:
    return (0, before / 50), (50, before), (at, before), (at + 1, after)


HIGH, SANE = ramp(0.15, 800), constant(3e-3)

TEXT = Recipe("text", COLLAPSES, HIGH, 500, reference="sane", layers=4, batch=8)
HARD = replace(TEXT, steps=700)
IMAGES = replace(TEXT, data="digits_2", batch=16, rate=ramp(0.1, 1000), reference="sane_images")
WITH_MLP = replace(TEXT, mlp=2, layers=4, rate=ramp(0.1, 600), reference="sane_mlp")

ATTENTION_ONLY = (
    *(replace(HARD, name=f"depth_{n}_seed_{seed}", layers=n, seed=seed) for n in (4, 6, 8, 12) for seed in (0, 1)),
    *(replace(HARD, name=f"head_64_seed_{seed}", heads=1, seed=seed) for seed in (0, 1)),
    *(replace(HARD, name=f"head_32_seed_{seed}", heads=2, seed=seed) for seed in (0, 1)),
    replace(HARD, name="wide_head_32", width=128, layers=4, rate=ramp(0.1, 1000)),
    replace(HARD, name="wide_head_64", width=128, heads=2, layers=4, rate=ramp(0.1, 1000)),
    replace(HARD, name="ramp_fast", rate=ramp(0.15, 250)),
    replace(HARD, name="ramp_slow", rate=ramp(0.3, 2400), steps=800),
    replace(HARD, name="ramp_then_constant", rate=ramp(0.1, 150)),
    replace(HARD, name="no_ramp", rate=constant(0.05, 1)),
    replace(HARD, name="adamw", optimizer="adamw", decay=0.1),
    replace(HARD, name="adamw_slow_second_moment", optimizer="adamw_999", decay=0.01),
    replace(HARD, name="nadam", optimizer="nadam"),
    replace(HARD, name="rmsprop", optimizer="rmsprop"),
    replace(HARD, name="sgd_qk", optimizer="sgd", rate=ramp(1.0, 400), qk_rate=30.0),
    replace(HARD, name="clip_1", clip=1.0),
    replace(HARD, name="clip_01", clip=0.1),
    replace(HARD, name="qk_rate_10", rate=ramp(0.015, 800), qk_rate=10.0),
    replace(HARD, name="qk_rate_30", rate=ramp(0.006, 800), qk_rate=30.0),
    *(replace(HARD, name=f"mha_seed_{seed}", call="mha", seed=seed) for seed in (0, 1)),
    replace(HARD, name="by_hand", call="scores"),
    replace(HARD, name="length_16", length=16),
    replace(HARD, name="length_64", length=64, layers=4),
    replace(HARD, name="batch_4", batch=4),
    replace(HARD, name="batch_16", batch=16),
    replace(HARD, name="prose", data="prose", reference="sane_prose"),
    replace(HARD, name="repeated_high", data="repeated", reference="sane_repeated"),
    replace(HARD, name="window_high", window=8, reference="sane_window"),
    *(replace(IMAGES, name=f"images_seed_{seed}", seed=seed) for seed in (0, 1)),
    *(replace(IMAGES, name=f"images_slow_seed_{seed}", rate=ramp(0.1, 2000), steps=700, seed=seed) for seed in (0, 1)),
    replace(IMAGES, name="images_head_32", heads=2),
    replace(IMAGES, name="images_depth_10", layers=10),
    replace(IMAGES, name="images_clip", clip=1.0),
    replace(IMAGES, name="images_adamw", optimizer="adamw", decay=0.1),
    replace(IMAGES, name="images_mha", call="mha"),
    replace(IMAGES, name="images_pixels", data="digits_1", layers=4, batch=16, steps=400),
    replace(IMAGES, name="images_mlp", mlp=2, layers=4),
)

WITH_FEED_FORWARD = (
    *(replace(WITH_MLP, name=f"mlp_seed_{seed}", seed=seed) for seed in (0, 1, 2)),
    replace(WITH_MLP, name="mlp_depth_8", layers=8),
    replace(WITH_MLP, name="mlp_head_32", heads=2),
    replace(WITH_MLP, name="mlp_mha", call="mha"),
    replace(WITH_MLP, name="mlp_adamw", optimizer="adamw", decay=0.1),
    replace(WITH_MLP, name="mlp_clip", clip=1.0),
    replace(WITH_MLP, name="mlp_slow", rate=ramp(0.1, 1500), steps=800),
    replace(WITH_MLP, name="mlp_qk_rate", rate=ramp(0.01, 600), qk_rate=10.0),
)

OVERFLOWING = tuple(
    replace(TEXT, name=f"half_{name}", label=OVERFLOWS, call="half", layers=4, rate=rate, steps=400, seed=seed)
    for name, rate, seed in (
        ("seed_0", ramp(0.3, 300), 0),
        ("seed_1", ramp(0.3, 300), 1),
        ("slow", ramp(0.3, 600), 0),
    )
)

SANE_TEXT = replace(TEXT, label=HEALTHY, rate=SANE)
SANE_IMAGES = replace(IMAGES, label=HEALTHY, rate=SANE)
SANE_MLP = replace(WITH_MLP, label=HEALTHY, rate=SANE)

PLAIN = (
    replace(SANE_TEXT, name="sane", reference="", steps=800),
    replace(SANE_TEXT, name="sane_low", rate=constant(1e-3), reference="", steps=500),
    replace(SANE_TEXT, name="sane_depth_12", layers=12),
    replace(SANE_TEXT, name="sane_depth_2", layers=2),
    replace(SANE_TEXT, name="sane_head_64", heads=1),
    replace(SANE_TEXT, name="sane_head_32", heads=2),
    replace(SANE_TEXT, name="sane_wide", width=128, layers=4),
    # Heads sharpen slowly in healthy training too: the longer, the closer to the lines of the rules.
    replace(SANE_TEXT, name="sane_wide_long", width=128, steps=1000, reference=""),
    replace(SANE_TEXT, name="sane_wide_long_seed_1", width=128, steps=1000, reference="", seed=1),
    replace(SANE_TEXT, name="sane_long", steps=1500, reference=""),
    replace(SANE_MLP, name="sane_mlp_long", steps=1500, reference=""),
    replace(SANE_TEXT, name="sane_mha", call="mha"),
    replace(SANE_TEXT, name="sane_adamw", optimizer="adamw", decay=0.1),
    replace(SANE_TEXT, name="sane_sgd", optimizer="sgd", rate=constant(0.1, 100), reference=""),
    replace(SANE_TEXT, name="sane_prose", data="prose", reference=""),
    replace(SANE_TEXT, name="sane_repeated", data="repeated", reference=""),
    replace(SANE_TEXT, name="sane_window", window=8, reference=""),
    replace(SANE_TEXT, name="sane_length_64", length=64, layers=4),
    replace(SANE_IMAGES, name="sane_images", reference=""),
    replace(SANE_IMAGES, name="sane_pixels", data="digits_1", layers=4, batch=16, steps=400, reference=""),
    replace(SANE_IMAGES, name="sane_images_mlp", mlp=2, layers=4),
    replace(SANE_MLP, name="sane_mlp", reference="", steps=800),
    replace(SANE_MLP, name="sane_mlp_depth_8", layers=8),
)

# Judged by their own lowest loss: at such a rate they learn more slowly, and what is asked is whether they fail.
NORMED = (
    *(
        replace(TEXT, name=f"norm_{norm}", norm=norm, label=HEALTHY, reference="")
        for norm in ("rms", "layer", "l2", "rms_across")
    ),
    *(
        replace(IMAGES, name=f"norm_{norm}_images", norm=norm, label=HEALTHY, reference="")
        for norm in ("rms", "layer", "l2", "rms_across")
    ),
    *(
        replace(TEXT, name=f"norm_{norm}_hot", norm=norm, rate=ramp(0.3, 800), label=HEALTHY, reference="")
        for norm in ("rms", "layer", "l2", "rms_across")
    ),
    replace(TEXT, name="norm_rms_depth_12", norm="rms", layers=12, label=HEALTHY, reference=""),
    replace(TEXT, name="norm_rms_head_64", norm="rms", heads=1, label=HEALTHY, reference=""),
    replace(TEXT, name="norm_rms_no_ramp", norm="rms", rate=constant(0.1, 1), label=HEALTHY, reference=""),
    replace(WITH_MLP, name="norm_rms_mlp", norm="rms", label=HEALTHY, reference=""),
    replace(WITH_MLP, name="norm_layer_mlp", norm="layer", label=HEALTHY, reference=""),
    replace(WITH_MLP, name="qwen3_high", call="qwen3", label=HEALTHY, reference=""),
    replace(WITH_MLP, name="qwen3_middle", call="qwen3", label=HEALTHY, reference="", rate=ramp(0.03, 600)),
    replace(WITH_MLP, name="qwen3_sane", call="qwen3", label=HEALTHY, reference="", rate=SANE),
)

# Judged by their own lowest loss as well: a model that begins with sinks, or saturated, starts behind.
SINKS = replace(SANE_TEXT, rate=constant(1e-3), reference="")

COPY = replace(SANE_TEXT, data="copy_previous", layers=2, rate=constant(0.01), reference="")

BENIGN = (
    replace(COPY, name="copy_previous_1", layers=1, rate=SANE),
    replace(COPY, name="copy_previous_2"),
    *(replace(COPY, name=f"copy_previous_2_seed_{seed}", seed=seed) for seed in (1, 2, 3)),
    replace(COPY, name="copy_previous_4", layers=4),
    replace(COPY, name="copy_previous_64", length=64),
    replace(COPY, name="copy_previous_mlp", mlp=2),
    replace(SANE_TEXT, name="copy_self", data="copy_self", layers=1, residual=False, reference=""),
    replace(
        SANE_TEXT,
        name="copy_previous_norm",
        data="copy_previous",
        layers=2,
        norm="rms",
        reference="",
        rate=constant(0.03),
    ),
    replace(SANE_MLP, name="periodic_norm", data="periodic", layers=2, norm="rms", reference="", rate=constant(0.03)),
    replace(SANE_TEXT, name="periodic", data="periodic", layers=2, reference="", rate=constant(0.01), steps=800),
    replace(SANE_TEXT, name="tied", start="tied", reference=""),
    replace(SANE_MLP, name="tied_mlp", start="tied", reference=""),
    replace(SINKS, name="sinks_first", data="started", start="sinks_first"),
    replace(SINKS, name="sinks_apart", start="sinks_apart"),
    replace(SINKS, name="sinks_spread", start="sinks_spread"),
    replace(SINKS, name="sinks_spread_seed_1", start="sinks_spread", seed=1),
    replace(SINKS, name="sinks_spread_64", start="sinks_spread", length=64),
    replace(SINKS, name="sinks_separators", start="sinks_separators"),
    replace(SINKS, name="sinks_first_mlp", data="started", start="sinks_first", mlp=2),
    replace(SINKS, name="sinks_apart_mlp", start="sinks_apart", mlp=2),
    replace(SINKS, name="sinks_spread_mlp", start="sinks_spread", mlp=2),
    replace(SINKS, name="sinks_separators_mlp", start="sinks_separators", mlp=2),
    replace(SANE_TEXT, name="uniform_frozen", start="blind", qk_rate=0.0, reference=""),
    replace(SANE_TEXT, name="uniform_no_residual", residual=False, layers=4, reference=""),
    replace(SANE_TEXT, name="short_4", length=4, reference=""),
    replace(SANE_TEXT, name="short_8", length=8, reference=""),
    replace(SANE_TEXT, name="long_128", length=128, layers=2, batch=8, reference=""),
    replace(SANE_TEXT, name="padded", data="padded", reference=""),
    replace(SANE_MLP, name="padded_mlp", data="padded", reference=""),
    replace(SANE_MLP, name="repeated_mlp", data="repeated", reference=""),
    replace(SANE_TEXT, name="window_4", window=4, reference="sane_window"),
    replace(SANE_TEXT, name="restart", rate=((0, 1e-4), (50, 6e-3), (250, 1e-4), (251, 6e-3), (500, 1e-4))),
    replace(SANE_MLP, name="restart_mlp", rate=((0, 1e-4), (50, 6e-3), (250, 1e-4), (251, 6e-3), (500, 1e-4))),
    replace(
        SANE_TEXT, name="fine_tuned", data="prose", before=500, rate=constant(1e-3), steps=300, reference="sane_prose"
    ),
    replace(SANE_MLP, name="fine_tuned_mlp", data="prose", before=500, steps=300, reference=""),
)

OTHER_FAILURES = (
    replace(SANE_TEXT, name="burst", data="burst", label=SPIKES),
    replace(SANE_MLP, name="burst_mlp", data="burst", label=SPIKES),
    replace(SANE_TEXT, name="sgd_norm", optimizer="sgd", norm="rms", rate=ramp(2.0, 600), label=SPIKES),
    replace(SANE_MLP, name="mlp_rate_1000", mlp_rate=1000.0, label=SPIKES),
)

# Trained until the heads have something to lose, then at a rate that is far too high from one step to the next.
STRUCTURED = replace(SINKS, data="started", start="sinks_first", mlp=2, reference="sane_mlp")
JUMPS = (
    replace(STRUCTURED, name="lose_sinks", label=SINKS_LOST, rate=jump(1e-3, 0.03, 250)),
    replace(STRUCTURED, name="lose_sinks_seed_1", label=SINKS_LOST, rate=jump(1e-3, 0.03, 250), seed=1),
    replace(STRUCTURED, name="lose_sinks_sgd", label=SINKS_LOST, optimizer="sgd", rate=jump(0.1, 0.7, 250)),
    *(
        replace(STRUCTURED, name=f"uniform_{norm}", label=UNIFORM, norm=norm, rate=jump(1e-3, 0.05, 250))
        for norm in ("rms", "layer", "l2")
    ),
    replace(STRUCTURED, name="uniform_seed_1", label=UNIFORM, norm="rms", rate=jump(1e-3, 0.05, 250), seed=1),
    replace(STRUCTURED, name="unlearn_sinks", label=HEALTHY, rate=jump(1e-3, 0.01, 250), reference=""),
    replace(SANE_TEXT, name="jump", label=COLLAPSES, rate=jump(3e-3, 0.1, 250)),
    replace(SANE_MLP, name="jump_mlp", label=COLLAPSES, rate=jump(3e-3, 0.1, 250)),
    replace(SANE_MLP, name="jump_periodic", label=COLLAPSES, data="periodic", layers=3, rate=jump(3e-3, 0.1, 400)),
    *(
        replace(SANE_MLP, name=f"jump_{norm}", label=SPIKES, norm=norm, rate=jump(3e-3, 0.1, 250))
        for norm in ("rms", "layer")
    ),
    replace(SANE_MLP, name="jump_qwen3", label=SPIKES, call="qwen3", rate=jump(3e-3, 0.1, 250)),
    replace(
        SANE_MLP, name="jump_copy", label=SPIKES, data="copy_previous", norm="rms", layers=2, rate=jump(3e-3, 0.1, 300)
    ),
    replace(SANE_MLP, name="jump_sgd", label=SPIKES, optimizer="sgd", rate=jump(0.1, 3.0, 250)),
)

RECIPES = (*ATTENTION_ONLY, *WITH_FEED_FORWARD, *OVERFLOWING, *PLAIN, *NORMED, *BENIGN, *OTHER_FAILURES, *JUMPS)
