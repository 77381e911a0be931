"""Scales, ticks, paths, thinning and heat maps: values worked out by hand."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import made_runs

from attnwatch.monitor.sample import Metric
from attnwatch.reports import charts, curves, heads, heat, known, lanes, panels

NAN = float("nan")


def test_element_escapes_text_and_attributes() -> None:
    """Whatever a model calls its layers stays text."""
    made = charts.element("text", '</text><script>"', class_='"><b')
    assert made == '<text class="&#34;&gt;&lt;b">&lt;/text&gt;&lt;script&gt;&#34;</text>'


def test_element_writes_short_numbers_and_leaves_out_none() -> None:
    assert charts.element("line", x1=1.0, y1=0.126, class_=None) == '<line x1="1" y1="0.13"></line>'


def test_scale_maps_the_ends_clips_and_keeps_nan() -> None:
    scale = charts.Scale(0.0, 10.0, 100.0, 0.0)
    assert scale([0, 5, 10, 20, -3]).tolist() == [100, 50, 0, 0, 100]
    assert np.isnan(scale(NAN))


def test_log_scale_puts_decades_at_equal_distances_and_zero_at_the_edge() -> None:
    scale = charts.Scale(1.0, 1000.0, 0.0, 30.0, log=True)
    assert scale([1, 10, 100, 1000, 0, -5]) == pytest.approx([0, 10, 20, 30, 0, 0])
    assert scale.ticks(4) == [1, 10, 100, 1000]


def test_an_axis_of_few_steps_has_whole_ones_only() -> None:
    """As of four checkpoints, whose steps are 0 to 3."""
    scale = charts.Scale(0, 3, 0, 100)
    assert scale.ticks(8) == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert re.findall(r">(\S+)</text>", charts.step_axis(scale, scale.ticks(8), 0, 1, 2)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks"),
    [
        (0, 1, 4, [0, 0.5, 1]),
        (0, 800, 8, [0, 100, 200, 300, 400, 500, 600, 700, 800]),
        (2.1, 3.9, 3, [3.0]),
        (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
        (-1e308, 1e308, 4, [-1e308, -5e307, 0, 5e307, 1e308]),
        (0, 3e-14, 3, [0, 1e-14, 2e-14, 3e-14]),
        (0, 4e-310, 2, [0, 2e-310, 4e-310]),
    ],
)
def test_round_values(low: float, high: float, count: int, ticks: list[float]) -> None:
    assert charts.round_values(low, high, count) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (NAN, "unknown"),
        (float("inf"), "∞"),
        (0.0, "0"),
        (688, "688"),
        (12345.6, "12,346"),
        (0.12345, "0.123"),
        (-1.5, "\N{MINUS SIGN}1.5"),
        (0.00042, "4.2e\N{MINUS SIGN}4"),
        (2.5e7, "2.5e7"),
    ],
)
def test_number_for_people(value: float, text: str) -> None:
    assert charts.number(value) == text


def test_limits_ignore_what_is_not_finite_and_never_leave_a_flat_axis() -> None:
    assert charts.limits([1.0, NAN, 3.0, np.inf], pad=0.5) == (0.0, 4.0)
    assert charts.limits([NAN]) == (0.0, 1.0)
    low, high = charts.limits([5.0, 5.0])
    assert low < 5 < high


EXTREME = st.sampled_from([1.7e308, -1.7e308, 1e-320, 5e-324, 0.0, -0.0, 1.0, NAN, np.inf, -np.inf, 1e16, 1e16 + 2])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(EXTREME | st.floats(), min_size=1, max_size=6), st.integers(1, 8))
@example([1e-320, 5e-324], 1)
@example([1e16, 1e16 + 2], 1)
def test_any_numbers_have_an_axis(values: list[float], count: int) -> None:
    """Whatever a trainer passed: limits that hold what can be drawn, a few rising ticks, and places within the axis."""
    limits = charts.log_limits(values, spread=30)
    low, high = limits or charts.limits(values)
    assert -np.inf < low < high < np.inf
    scale = charts.Scale(low, high, 100.0, 0.0, log=limits is not None)
    ticks = scale.ticks(count)
    assert len(ticks) <= 3 * count + 3
    assert (np.diff(ticks) > 0).all()
    places = scale(values)
    assert ((places >= 0) & (places <= 100))[~np.isnan(values)].all()


@pytest.mark.parametrize(("first", "last"), [(0, 0), (5, 5), (2**62, 2**62), (-(2**62), -(2**62)), (0, 2**62)])
def test_an_axis_of_steps_is_never_empty(first: int, last: int) -> None:
    low, high = charts.span(first, last)
    assert low < high
    assert charts.Scale(low, high, 0, 10).ticks(4)


@pytest.mark.parametrize(
    ("value", "text"), [(NAN, ""), (None, ""), (1234567.0, "1.23457e+06"), (-0.00012, "-0.00012"), (12.5, "12.5")]
)
def test_copyable_numbers_are_numbers_to_a_program(value: float | None, text: str) -> None:
    assert charts.copyable(value) == text
    assert text == "" or float(text) == pytest.approx(value, rel=1e-5)


def test_path_is_relative_in_quarter_pixels_and_breaks_at_gaps() -> None:
    x, y = np.array([0.0, 1, 2, 3, 4]), np.array([10.0, 8, NAN, 8, 9])
    assert charts.path(x, y) == "M0 40l4-8M12 32l4 4"


def test_path_draws_a_lone_point_as_a_dot() -> None:
    assert charts.path(np.array([1.0]), np.array([2.0])) == "M4 8h0"


def test_area_goes_there_and_back() -> None:
    x = np.array([0.0, 1.0])
    assert charts.area(x, np.array([2.0, 2.0]), np.array([1.0, 1.0])) == "M0 8l4 0L4 4l-4 0Z"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6) | st.just(NAN), min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_every_peak_in_few_points(values: list[float], limit: int) -> None:
    """The extremes of the whole line survive, in order of x, and no value is made up."""
    y = np.array(values)
    at, level = charts.thin(np.arange(len(y)), y, limit)
    assert len(at) <= limit
    assert (np.diff(at) > 0).all()
    np.testing.assert_array_equal(level, y[at.astype(int)])
    if np.isfinite(y).any():
        assert (np.nanmin(level), np.nanmax(level)) == (np.nanmin(y), np.nanmax(y))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32) | st.just(NAN), min_size=5, max_size=5), min_size=1, max_size=8)
)
def test_median_is_numpys_over_the_known_values(rows: list[list[float]]) -> None:
    values = np.array(rows, dtype=np.float32)
    expected = [np.median(row[~np.isnan(row)].astype(np.float64)) if (~np.isnan(row)).any() else NAN for row in values]
    np.testing.assert_allclose(panels.median(values), expected, rtol=1e-6, atol=1e-6)


def test_reduce_keeps_a_spike_of_one_head_in_the_range() -> None:
    """1,000 samples in 40 groups: one head's spike at sample 333 lies in group 13 and is not lost."""
    values = np.ones((1000, 2, 3), dtype=np.float32)
    values[333, 1, 2] = 9
    part = panels.reduce(np.arange(1000), values, Metric("m", "1", "", "mean"), panels.Detail(40, 64))
    assert part.high.tolist() == [9.0 if group == 13 else 1.0 for group in range(40)]
    assert part.low.tolist() == [1.0] * 40
    assert part.lines.shape == (40, 2)
    assert part.steps[[0, -1]].tolist() == [24, 999]


def test_reduce_does_not_tear_a_line_that_is_measured_at_every_fifth_sample() -> None:
    values = np.full((10, 1, 2), NAN, dtype=np.float32)
    values[::5] = 3
    weights = panels.reduce(np.arange(10), values, Metric("m", "1", "", "last"), panels.Detail(500, 64))
    assert (weights.steps.tolist(), weights.lines[:, 0].tolist()) == ([0, 5], [3, 3])
    activations = panels.reduce(np.arange(10), values, Metric("m", "1", "", "mean"), panels.Detail(500, 64))
    assert np.isnan(activations.lines[:, 0]).sum() == 8


def test_thresholds_are_read_from_the_rules_and_only_for_the_whole_name() -> None:
    rules = [
        {"name": "b", "severity": "info", "when": "entropy_ratio < 0.3"},
        {
            "name": "a",
            "severity": "critical",
            "when": "entropy_ratio < 0.3 and my_entropy_ratio < 9 and entropy >= 2e1",
        },
    ]
    assert panels.thresholds("entropy_ratio", rules) == [panels.Threshold(0.3, "critical", "a")]
    assert panels.thresholds("entropy", rules) == [panels.Threshold(20.0, "critical", "a")]


def reduced(values: list[float]) -> panels.Reduced:
    array = np.array(values, dtype=np.float32).reshape(-1, 1, 1)
    return panels.reduce(np.arange(len(values)), array, Metric("m", "1", "", "mean"), panels.Detail(100, 8))


@pytest.mark.parametrize(
    ("values", "low", "is_log"),
    [
        ([2.0, 90.0, 900.0], 2.0, True),
        ([-5.0, 0.0, 4.0, 50_000.0], 4.0, True),  # signed, yet a linear axis would press 4 to 0
        ([1e-9, 4.0, 50_000.0], 4.0, True),  # more than six decades below the highest
        ([-5.0, 0.0, 4.0, 500.0], None, False),
        ([0.0, 0.01, 3.0], None, False),  # an entropy that falls to nothing
        ([0.0, 0.0, 2112.0], None, False),
    ],
)
def test_an_axis_is_logarithmic_where_a_linear_one_would_hide_all_but_the_largest(
    values: list[float], low: float | None, is_log: bool
) -> None:
    scale = panels.value_scale("m", [reduced(values)], [])
    assert scale.log == is_log
    assert low is None or scale.low == pytest.approx(low / 1.3)


@pytest.mark.parametrize(("count", "width"), [(10, 1), (100, 2), (400, 10), (800, 20), (3000, 20)])
def test_the_mean_over_a_short_loss_is_short(count: int, width: int) -> None:
    """A jump in the middle is passed after `width` steps: a fortieth of the run, 20 at most."""
    values = np.where(np.arange(count) < count // 2, 0.0, 1.0)
    drawn = curves.smooth(values, 1500)
    assert int(np.sum((drawn > 0) & (drawn < 1 - 1e-9))) == width - 1


def test_a_number_that_is_only_a_factor_is_no_threshold() -> None:
    """`x < 0.5 * start(x)` compares with half of what the head began with, not with 0.5."""
    rules = [{"name": "a", "severity": "critical", "when": "x < 0.5 * start(x) or x > 3 - y or (x >= 7)"}]
    assert panels.thresholds("x", rules) == [panels.Threshold(7.0, "critical", "a")]


@pytest.mark.parametrize(
    ("when", "band"),
    [
        ("x < 0.3 and y > 1", (0.3, np.inf)),
        ("x > 3 or x > 5", (-np.inf, 3.0)),
        ("x < 0.3 or x > 0.9", (0.3, 0.9)),
        ("x > 0.3 and x < 0.9", None),
        ("y < 2", None),
        ("x < 0.5 * start(x)", None),
    ],
)
def test_healthy_band_is_what_no_critical_rule_asks_for(when: str, band: tuple[float, float] | None) -> None:
    rules = [
        {"name": "a", "severity": "critical", "when": when}, {"name": "b", "severity": "warning", "when": "x < 0.8"},
    ]  # fmt: skip
    assert panels.healthy_band("x", rules) == band


@pytest.mark.parametrize("width", [1, 3, 20, 200])
def test_running_mean_is_the_mean_of_each_window_whatever_came_before(width: int) -> None:
    """A spike of 1e20 is forgotten when the window has left it."""
    values = np.random.default_rng(0).normal(size=101)
    values[[7, 60]] = 1e20, NAN
    expected = [np.mean(values[max(end - width, 0) : end]) for end in range(1, 102)]
    np.testing.assert_allclose(curves.running_mean(values, width), expected, rtol=1e-9)


def test_running_mean_is_short_at_the_start_and_blind_behind_a_nan() -> None:
    mean = curves.running_mean(np.array([1.0, 3.0, 5.0, NAN, 1.0, 1.0]), 2)
    np.testing.assert_array_equal(mean, [1, 2, 4, NAN, NAN, 1])


def test_levels_run_from_one_to_the_last_and_nan_is_none_of_them() -> None:
    assert heat.levels(np.array([0, 0.5, 1, 2, NAN]), 0, 1).tolist() == [1, 32, 63, 63, 0]
    assert heat.levels(np.array([1.0, 0.0]), 1, 0).tolist() == [1, 63]
    assert heat.levels(np.array([1, 10, 100, -5.0]), 1, 100, log=True).tolist() == [1, 32, 63, 1]


def decode(uri: str) -> np.ndarray:
    """Palette indices of a PNG, by a reader of its own that checks every checksum."""
    data, chunks = base64.b64decode(uri.removeprefix("data:image/png;base64,")), {}
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour, len(chunks[b"PLTE"]), chunks[b"tRNS"]) == (8, 3, 3 * 64, b"\0")
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_sprite_stacks_frames_and_survives_a_png_reader() -> None:
    values = np.array([[[0, 1], [NAN, 0.5]], [[1, 1], [0, 0]]])
    assert decode(heat.sprite(values, 0, 1)).tolist() == [[1, 63], [0, 32], [63, 63], [1, 1]]


@pytest.mark.parametrize("theme", heat.RAMPS)
def test_ramps_change_lightness_one_way(theme: str) -> None:
    """Readable in grey: Rec. 709 luma rises or falls all along the ramp."""
    channels = [[float(value) for value in heat.table(theme, channel).split()] for channel in range(3)]
    luma = np.array([0.2126, 0.7152, 0.0722]) @ np.array(channels)
    assert (np.diff(luma) > 0.03).all() or (np.diff(luma) < -0.03).all()


def test_frames_hold_the_ends_and_the_moments_within_the_limit() -> None:
    steps = np.arange(0, 10_000, 10)
    frames = heads.frame_indices(steps, [5432, 99], 20)
    assert len(frames) <= 20
    assert {0, 999, 543, 9} <= set(frames.tolist())
    assert heads.frame_indices(steps[:3], [], 20).tolist() == [0, 1, 2]


def test_held_keeps_the_last_known_value_of_each_head() -> None:
    values = np.array([[[NAN, 1]], [[2, NAN]], [[NAN, NAN]]], dtype=np.float32)
    np.testing.assert_array_equal(known.held(values)[:, 0], [[NAN, 1], [2, 1], [2, 1]])
    np.testing.assert_array_equal(known.held(values, rows=np.array([2, 0]))[:, 0], [[2, 1], [NAN, 1]])
    nothing = known.held(np.full((2, 1, 1), NAN, np.float32))
    assert nothing.shape == (2, 1, 1)
    assert np.isnan(nothing).all()


def test_held_forgets_what_is_no_longer_proved_until_it_is_measured_again() -> None:
    """One layer, one head, measured at samples 0 and 4; from sample 2 on its weights were not proved."""
    values = np.array([1, NAN, NAN, NAN, 5, NAN], dtype=np.float32)[:, None, None]
    gone = np.array([False, False, True, False, False, False])[:, None]
    np.testing.assert_array_equal(known.held(values, gone)[:, 0, 0], [1, 1, NAN, NAN, 5, 5])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_held_is_what_a_walk_through_the_samples_remembers(rows: list[tuple[bool, bool, bool]]) -> None:
    """Two heads of one layer: whether each is measured at a sample, and whether the layer is forgotten there."""
    values = np.array([[[i if a else NAN, i if b else NAN]] for i, (a, b, _) in enumerate(rows)], dtype=np.float32)
    gone = np.array([[lost] for *_, lost in rows])
    memory, expected = [NAN, NAN], []
    for (measured, lost), row in zip([(r[:2], r[2]) for r in rows], values[:, 0], strict=True):
        memory = [x if m else NAN if lost else old for m, x, old in zip(measured, row, memory, strict=True)]
        expected.append(memory)
    np.testing.assert_array_equal(known.held(values, gone)[:, 0], expected)


def test_lanes_leave_out_what_never_fired_and_keep_the_gravest() -> None:
    """Twenty informative rules, then a critical one: the critical one keeps its lane; lanes stand in order of time."""
    infos = [made_runs.alert(f"info_{i:02}", severity="info", pending_step=i, fired_step=i) for i in range(20)]
    gone = made_runs.alert("gone", state="resolved", fired_step=None, resolved_step=9)
    found = lanes.alert_lanes((gone, *infos, made_runs.alert()))
    assert [lane[0].rule for lane in found] == [f"info_{i:02}" for i in range(11)] + ["sparse_low_rank"]


def test_numbers_that_differ_beyond_the_twelfth_digit_share_a_tick() -> None:
    for low in (1e16, 1e-7, -3e5, 1.0):
        for count in (1, 4, 8):
            ticks = charts.round_values(low, float(np.nextafter(low, np.inf)), count)
            assert (np.diff(ticks) > 0).all()
