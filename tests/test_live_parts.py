"""The parts of the live screen by themselves: what is read anew, digits, sparklines, names, keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests import made_runs

from attnwatch.monitor.follow import Follower
from attnwatch.monitor.run import open_run
from attnwatch.monitor.sample import Sample
from attnwatch.monitor.store import RunWriter
from attnwatch.reports import glyphs
from attnwatch.reports.glyphs import digits, duration, short, sparkline
from attnwatch.reports.grid import short_names
from attnwatch.reports.heads import Colours
from attnwatch.reports.keys import View, decode, press
from attnwatch.reports.live import Look, frame

METRICS = ("entropy_ratio", "qk_rank")


def sample(writer: RunWriter, step: int, entropy: float, rank: float = np.nan) -> None:
    values = np.array([entropy, rank], np.float32).reshape(2, 1, 1)
    writer.sample(Sample(step, 100.0 + step, METRICS, ("a",), values, 0.5))


def test_a_look_reads_only_what_came_since(tmp_path: Path) -> None:
    """What was read before may be changed on the disk: it is not looked at again, and what is new is there."""
    path = tmp_path / "run"
    writer = RunWriter(path, made_runs.header(METRICS))
    sample(writer, 0, 0.5, 7.0)
    writer.scalars(0, {"loss": 3.0})
    follower = Follower(path)
    for name, at in (("scalars.jsonl", 12), ("samples/rank00000-000001.awlog", 26)):
        with (path / name).open("r+b") as file:
            file.seek(at)
            file.write(b"9")
    sample(writer, 10, 0.4)
    writer.scalars(1, {"loss": 2.0, "lr": 0.1})
    follower.look()
    writer.close()
    assert open_run(path).problems != ()  # who reads it all sees the damage
    assert follower.run.problems == ()
    assert len(follower.run.steps) == 2
    assert follower.run.scalar("loss")[1].tolist() == [3.0, 2.0]
    assert follower.run.scalar("lr")[0].tolist() == [1]
    assert follower.run.history("entropy_ratio", "a", 0).tolist() == np.array([0.5, 0.4], np.float32).tolist()
    assert follower.heads.values["qk_rank"].item() == 7.0  # known from the first sample
    assert follower.heads.values["entropy_ratio"].item() == np.float32(0.4)


def test_looks_end_where_one_reading_of_everything_does(tmp_path: Path) -> None:
    """Layers that join, segments that roll, steps recorded twice, lines that are no JSON or not whole yet."""
    path = tmp_path / "run"
    writer = RunWriter(path, made_runs.header(METRICS))
    follower = Follower(path)
    rng = np.random.default_rng(0)
    for number, step in enumerate((0, 10, 20, 10, 30)):
        layers = ("a",) if number < 2 else ("a", "b")
        writer.sample(Sample(step, float(number), METRICS, layers, rng.random((2, len(layers), 3), np.float32), 0.1))
        writer.scalars(step, {"loss": float(number)})
        with (path / "scalars.jsonl").open("ab") as file:
            file.write(b"not JSON\n" if number == 1 else b"")
        writer._scalars.size = (path / "scalars.jsonl").stat().st_size
        made_runs.write_alert(writer, made_runs.alert(pending_step=step))
        follower.look()
    writer.close()
    looked, whole = follower.run, open_run(path)
    assert follower.trouble == ""
    assert looked.problems == whole.problems
    assert len(whole.problems) == 1
    assert (looked.layers, looked.heads, looked.alerts) == (whole.layers, whole.heads, whole.alerts)
    for name in ("steps", "times", "seconds"):
        assert np.array_equal(getattr(looked, name), getattr(whole, name))
    assert np.array_equal(looked.scalar("loss"), whole.scalar("loss"))
    assert np.array_equal(looked.metric("qk_rank"), whole.metric("qk_rank"), equal_nan=True)
    assert np.array_equal(whole.history("qk_rank", "b", 2), whole.metric("qk_rank")[:, 1, 2], equal_nan=True)
    assert list(looked.iter_scalars()) == list(whole.iter_scalars())


def test_a_directory_that_is_away_is_said_and_comes_back_or_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = RunWriter(path, made_runs.header(METRICS))
    sample(writer, 0, 0.5)
    writer.close()
    follower = Follower(path)
    path.rename(tmp_path / "away")
    follower.look()
    assert "found nothing" in follower.trouble
    assert len(follower.run.steps) == 1
    writer = RunWriter(path, {**made_runs.header(METRICS), "created": "later"})
    follower.look()
    writer.close()
    assert follower.trouble == ""
    assert len(follower.run.steps) == 0
    assert follower.heads.layers == []


@pytest.mark.parametrize("height", range(6, 40, 3))
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_chosen_layer_is_on_the_screen_however_low_it_is(width: int, height: int, tmp_path: Path) -> None:
    """Of a run whose verdict alone is several lines."""
    look = Look(Follower(made_runs.collapse(tmp_path / "run", steps=800)), 0.0)
    lines = [line.plain for line in frame(look, View(layer=7), width, height)]
    assert len(lines) == height
    assert [line[:3] for line in lines if line.startswith((">", " 7"))][0] == "> 7"  # noqa: RUF015


def test_digits_are_tenths_of_the_scale() -> None:
    values = np.array([0.0, 0.05, 0.15, 0.55, 0.95, 1.0, 7.0, -1.0, np.nan, np.inf, -np.inf])
    assert "".join(digits(values, Colours(0.0, 1.0))) == "00159990-!!"
    assert "".join(digits(values[:3], Colours(1.0, 0.0))) == "998"
    assert "".join(digits(np.array([1.0, 10.0, 100.0]), Colours(1.0, 100.0, log=True))) == "059"


def test_every_digit_reads_on_its_colour_and_colours_go_one_way() -> None:
    """Relative luminance and contrast as WCAG 2 defines them; 4.5 is asked of text."""

    def luminance(colour: str) -> float:
        channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    styles = [glyphs.style(str(digit)) for digit in range(10)]
    pairs = [(luminance(s.color.name), luminance(s.bgcolor.name)) for s in styles if s.color and s.bgcolor]
    assert len(pairs) == 10
    assert min((max(pair) + 0.05) / (min(pair) + 0.05) for pair in pairs) >= 4.5
    grounds = [ground for _, ground in pairs]
    assert grounds == sorted(grounds)


def test_a_sparkline_is_means_of_stretches_with_gaps_and_breaks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, ascii_only=True) == ".:-=+*#@"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([0, np.nan, np.nan, np.inf, 7], 5) == "▁  !█"
    assert sparkline([np.nan, np.inf], 2) == " !"
    assert sparkline([5.0, 5.0], 2) == "▁▁"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""
    assert sparkline([1e308, 1e308, -1e308], 3)[2] == "▁"
    assert sparkline([*np.linspace(0, 1, 99), 1000.0], 100)[40:60] != "▁" * 20  # one peak does not flatten the rest


def test_names_are_shortened_to_what_differs() -> None:
    assert short_names(["model.layers.1.attn", "model.layers.10.attn"]) == ("1", "10")
    assert short_names(["enc.0.attn", "dec.0.attn"]) == ("enc", "dec")
    assert short_names(["a", "a.b"]) == ("a", "a.b")
    assert short_names(["attn", "attn#1"]) == ("attn", "attn#1")
    assert short_names(["only.one"]) == ("only.one",)
    assert short_names([]) == ()


def test_keys_are_read_whole_even_when_they_come_in_parts() -> None:
    assert decode(b"qm\x1b[A\x1bOB\x1b[5~\r") == (["q", "m", "up", "down", "page up", "enter"], b"")
    assert decode(b"j\x1b") == (["j"], b"\x1b")
    assert decode(b"\x1b[") == ([], b"\x1b[")
    assert decode(b"\x1b[1;5C\x1b[200~x\xc3\xa9\x00") == (["x"], b"")  # what means nothing here
    assert decode(b"\x1bq") == (["q"], b"")


@pytest.mark.parametrize(
    ("keys", "end"),
    [
        ("jjjj", View(0, 2, 0)),
        ("kh", View(0, 0, 0)),
        ("lll", View(0, 0, 1)),
        ("M", View(3, 0, 0)),
        ("mmmmm", View(1, 0, 0)),
        ("?d", View(0, 0, 0, "grid")),
        ("dm?", View(1, 0, 0, "help")),
        ("x", View()),
        ("q", None),
    ],
)
def test_keys_move_within_what_there_is(keys: str, end: View | None) -> None:
    view: View | None = View()
    for key in keys:
        assert view is not None
        view = press(view, key, metrics=4, layers=3, heads=2)
    assert view == end
    assert press(View(), "down", 0, 0, 0) == View()


def test_durations_and_numbers_are_short() -> None:
    assert [duration(s) for s in (0.25, 8.9, 89, 90, 7199, 7200, 86400 * 2)] == [
        "0.25 s", "8 s", "89 s", "1 min", "119 min", "2 h", "2 days",
    ]  # fmt: skip
    assert [short(x) for x in (0.12345, 1234.0, np.nan, np.inf)] == ["0.123", "1.23e+03", "unknown", "inf"]
