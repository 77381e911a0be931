"""The page under somebody's hands: zoom, cursor, heat maps by keys and pointer, copying; and what axe-core says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests import made_runs
from tests.browser import Browser
from tests.test_report import small_run

from attnwatch.monitor.run import Run
from attnwatch.monitor.store import open_run
from attnwatch.reports import html

METRICS = ("entropy_ratio", "qk_rank_ratio", "spread_ratio", "map_rank", "qk_energy_top1", "qk_energy_top10",
           "qk_directions_90", "qk_rank")  # fmt: skip
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "PageDown": 34, "Home": 36, "End": 35, "Tab": 9, "+": 187,
        "-": 189, "0": 48}  # fmt: skip
SHOWN = "document.querySelector('.zooming output').textContent"
READ = "document.querySelector('.chart:has(.timeline) + .readout').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """800 steps each, sampled every 10th; the first collapses."""
    place = tmp_path_factory.mktemp("runs")
    return [
        open_run(made_runs.collapse(place / name, collapses=name == "plain", layers=3, heads=2, metrics=METRICS))
        for name in ("plain", "qk_norm")
    ]


@pytest.fixture(scope="module")
def page(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return html.write_report(runs[:1], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def both(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return html.write_report(runs, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of ten runs; of each state there is one at least, the healthy ones first and last."""
    place = tmp_path_factory.mktemp("crowd")
    alerts = {
        "warning": [made_runs.alert("entropy_collapse", severity="warning")],
        "diverged": [made_runs.divergence(5, 20)],
        "critical": [made_runs.alert("nonfinite")],
        "collapsed": [made_runs.alert()],
    }
    runs = [small_run(place / f"healthy{at}", samples=3) for at in range(4)]
    runs += [small_run(place / name, *fired) for name, fired in alerts.items()]
    runs += [small_run(place / "unknown", samples=1), small_run(place / "last", samples=3)]
    return html.write_report(runs, place / "report.html")


def press(browser: Browser, key: str, times: int = 1) -> None:
    """A real key, as the browser gets it from a keyboard."""
    known = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
    for _ in range(times):
        browser.call("Input.dispatchKeyEvent", type="rawKeyDown", **known)
        browser.call("Input.dispatchKeyEvent", type="keyUp", **known)


def mouse(browser: Browser, kind: str, x: float, y: float, **buttons: object) -> None:
    browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, pointerType="mouse", **buttons)


def box(browser: Browser, selector: str) -> dict[str, float]:
    """Where an element is in the window, in its middle if it was not there before."""
    found: dict[str, float] = browser.evaluate(
        f"(n => {{ n.scrollIntoView({{block: 'center', behavior: 'instant'}}); "
        f"return (({{x, y, width, height}}) => ({{x, y, width, height}}))(n.getBoundingClientRect()) }})"
        f"(document.querySelector({selector!r}))"
    )
    return found


def ticks(browser: Browser, chart: str) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll('{chart} .steps text')].map(t => t.textContent)"
    )
    return found


def at_step(place: dict[str, float], step: float) -> float:
    """The x of a step in a time line that shows the whole run: 172 to 1,022 of 1,040 units are steps 0 to 800."""
    return place["x"] + place["width"] * (172 + 850 * step / 800) / 1040


def test_time_line_zooms_by_keys_and_all_charts_follow(browser: Browser, page: Path) -> None:
    """+ halves the range about the cursor; the steps of every chart are written anew; 0 shows the whole run."""
    browser.open(page)
    browser.evaluate("document.querySelector('.chart').focus()")
    assert (browser.evaluate(SHOWN), ticks(browser, ".panel")[:5]) == (
        "the whole run",
        ["0", "200", "400", "600", "800"],
    )
    press(browser, "PageDown", 5)  # the cursor is a tenth of the 801 steps further each time
    assert browser.evaluate(READ).startswith("step 400, loss ")
    press(browser, "+", 2)
    assert browser.evaluate(SHOWN) == "steps 300 to 500"
    assert ticks(browser, ".panel")[:5] == ["300", "350", "400", "450", "500"]
    assert ticks(browser, ".timeline") == ["300", "350", "400", "450", "500"]  # 25 a tick is no round number, 50 is
    moved = browser.evaluate("document.querySelector('.panel .zoom').transform.baseVal.consolidate().matrix.a")
    assert moved == pytest.approx(4)
    press(browser, "End")  # the cursor leaves the range: it follows
    assert browser.evaluate(SHOWN) == "steps 600 to 800"
    press(browser, "-")
    assert browser.evaluate(SHOWN) == "steps 400 to 800"
    press(browser, "0")
    assert browser.evaluate(SHOWN) == "the whole run"
    assert browser.complaints == []


def test_texts_and_circles_keep_their_shape_when_zoomed(browser: Browser, page: Path) -> None:
    browser.open(page)
    size = (
        "[...document.querySelectorAll('.timeline .zoom circle')].map(c => c.getBoundingClientRect().width.toFixed(1))"
    )
    before = browser.evaluate(size)
    browser.evaluate("document.querySelector('.chart').focus()")
    press(browser, "+", 3)
    assert browser.evaluate(size) == before


def test_time_line_reads_out_what_the_pointer_is_at(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page)
    place = box(browser, ".timeline")
    mouse(browser, "mouseMoved", at_step(place, 523), place["y"] + 100)
    found = re.fullmatch(r"step (\d+), loss (\S+), lr (\S+)", browser.evaluate(READ))
    assert found
    step = int(found[1])
    assert step == pytest.approx(523, abs=1)
    loss = dict(zip(*(each.tolist() for each in runs[0].scalar("loss")), strict=True))
    assert float(found[2]) == pytest.approx(loss[step], rel=1e-3)
    assert float(found[3]) == pytest.approx(0.1 * step / 600, rel=1e-3)
    cursors = "[...document.querySelectorAll('.cursor')].map(c => c.getAttribute('visibility'))"
    assert set(browser.evaluate(cursors)) == {"visible"}  # in every chart


def test_dragging_over_the_time_line_zooms_and_a_double_click_shows_all(browser: Browser, page: Path) -> None:
    browser.open(page)
    place = box(browser, ".timeline")
    y = place["y"] + 100
    mouse(browser, "mouseMoved", at_step(place, 200), y)
    mouse(browser, "mousePressed", at_step(place, 200), y, button="left", buttons=1, clickCount=1)
    mouse(browser, "mouseMoved", at_step(place, 300), y, button="left", buttons=1)
    mouse(browser, "mouseMoved", at_step(place, 400), y, button="left", buttons=1)
    assert browser.evaluate("document.querySelectorAll('.brush').length") == 1
    mouse(browser, "mouseReleased", at_step(place, 400), y, button="left", clickCount=1)
    begin, end = map(int, re.findall(r"\d+", browser.evaluate(SHOWN)))
    assert (begin, end) == (pytest.approx(200, abs=2), pytest.approx(400, abs=2))
    for count in (1, 2):
        mouse(browser, "mousePressed", at_step(place, 400), y, button="left", buttons=1, clickCount=count)
        mouse(browser, "mouseReleased", at_step(place, 400), y, button="left", clickCount=count)
    assert browser.evaluate(SHOWN) == "the whole run"
    assert browser.evaluate("document.querySelectorAll('.brush').length") == 0


def test_buttons_zoom_and_move(browser: Browser, page: Path) -> None:
    browser.open(page)
    click = "[...document.querySelectorAll('.zooming button')].find(b => b.ariaLabel.startsWith('{}')).click()"
    browser.evaluate(click.format("zoom in"))
    assert browser.evaluate(SHOWN) == "steps 200 to 600"
    browser.evaluate(click.format("later"))
    assert browser.evaluate(SHOWN) == "steps 400 to 800"
    browser.evaluate(click.format("later"))  # nothing lies beyond the end
    assert browser.evaluate(SHOWN) == "steps 400 to 800"
    browser.evaluate(click.format("show all"))
    assert browser.evaluate(SHOWN) == "the whole run"


def test_a_chart_by_layer_reads_out_lowest_highest_and_median(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page)
    place = box(browser, ".panel")
    mouse(browser, "mouseMoved", place["x"] + place["width"] * 0.999 * (38 + 294) / 340, place["y"] + 60)
    text = browser.evaluate("document.querySelector('.panel .told').textContent")
    found = re.fullmatch(r"step ([\d,]+): (\S+) to (\S+), median (\S+)", text)
    assert found
    values = runs[0].metric("entropy_ratio")[runs[0].steps.tolist().index(int(found[1]))]
    assert float(found[2]) == pytest.approx(values.min(), rel=0.01)
    assert float(found[3]) == pytest.approx(values.max(), rel=0.01)


def test_heat_maps_are_read_by_keys(browser: Browser, page: Path, runs: list[Run]) -> None:
    """From the first layer's first head one down and one right, and no further than the last."""
    browser.open(page)
    read = "document.querySelector('.heats .readout').textContent"
    browser.evaluate("document.querySelector('.map').focus()")
    press(browser, "ArrowDown")
    press(browser, "ArrowRight", 4)
    found = re.fullmatch(r"blocks\.1\.attention, head 1: entropy_ratio about (\S+)", browser.evaluate(read))
    assert found
    index = runs[0].steps.tolist().index(540)
    assert float(found[1]) == pytest.approx(float(runs[0].metric("entropy_ratio")[index, 1, 1]), abs=0.8 / 62 + 0.005)


def test_every_control_is_reached_with_the_tab_key(browser: Browser, page: Path) -> None:
    """In the order of the page, and what has the focus shows it."""
    browser.open(page)
    seen: list[str] = []
    for _ in range(30):
        press(browser, "Tab")
        seen.append(
            browser.evaluate(
                "document.activeElement.className || document.activeElement.name || document.activeElement.localName"
            )
        )
        if seen[-1] == "scroll chart":
            assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert "scroll chart" in seen
    assert seen.index("a") < seen.index("button") < seen.index("scroll chart") < seen.index("summary")


def test_tables_are_copied_as_they_stand(browser: Browser, both: Path) -> None:
    browser.open(both)
    browser.evaluate(  # the browser's own clipboard asks its user first
        "navigator.clipboard.writeText = async (text) => { window.copied = text; }; "
        "document.querySelector('.outcomes').closest('.scroll').nextElementSibling.click()"
    )
    rows = [row.split("\t") for row in browser.evaluate("window.copied").split("\n")]
    assert rows[0][:4] == ["run", "verdict", "main alert", "fired"]
    assert [row[0] for row in rows[1:]] == ["plain", "qk_norm"]
    assert (rows[1][3], rows[1][5], rows[1][6]) == ("540", "688", "168")


def test_runs_are_told_apart_without_colour(browser: Browser, both: Path) -> None:
    """In the picture of all runs each has a dash of its own."""
    browser.open(both)
    dashes = "g => g.querySelector('path').getAttribute('stroke-dasharray')"
    assert browser.evaluate(f"[...document.querySelectorAll('.overlay .zoom > g')].map({dashes})") == [None, "7 3"]


def test_of_many_runs_the_table_of_verdicts_leads_gravest_first(browser: Browser, crowd: Path) -> None:
    """With how many there are of each above it, and every verdict in full folded away."""
    browser.open(crowd)
    sections = "[...document.querySelectorAll('main section')].slice(0, 2).map(s => s.id || s.className)"
    assert browser.evaluate(sections) == ["compared", "verdicts"]
    assert browser.evaluate("document.querySelector('.verdicts').closest('details').open") is False
    names = browser.evaluate("[...document.querySelectorAll('.outcomes tbody th')].map(th => th.innerText.trim())")
    assert names == [
        "diverged", "collapsed", "critical", "warning", "unknown", *(f"healthy{at}" for at in range(4)), "last",
    ]  # fmt: skip
    drawn = browser.evaluate("[...document.querySelectorAll('.panel > title')].map(title => title.textContent)")
    assert drawn == [f"entropy_ratio by layer, {name}" for name in names[:6]]
    counts = browser.evaluate("[...document.querySelectorAll('.tally .tone')].map(each => each.innerText)")
    assert counts == [
        "▲ diverged: 1",
        "▲ collapsed: 1",
        "▲ critical: 1",
        "◆ warning: 1",
        "? unknown: 1",
        "✓ healthy: 5",
    ]


def complaints(browser: Browser, **options: Any) -> list[str]:
    """What axe-core finds wrong with the page as it stands, everything unfolded."""
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # laid out anew
    browser.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text() + ";0")
    asked = {"resultTypes": ["violations"], "preload": False, **options}
    found: list[str] = browser.evaluate(
        f"axe.run({json.dumps(asked)})"
        ".then(r => r.violations.flatMap(v => v.nodes.map(n => v.id + ' ' + n.html.slice(0, 120))))"
    )
    return found


def test_axe_finds_nothing_wrong(browser: Browser, both: Path) -> None:
    browser.open(both)
    assert complaints(browser) == []


def test_axe_finds_contrast_enough_in_the_dark(browser: Browser, both: Path) -> None:
    browser.open(both, dark=True)
    assert complaints(browser, runOnly=["color-contrast", "scrollable-region-focusable"]) == []


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_axe_finds_every_verdict_readable(browser: Browser, crowd: Path, dark: bool, width: int) -> None:
    """The colours of all six, on a wide and on a narrow screen."""
    browser.open(crowd, dark=dark, width=width)
    assert complaints(browser) == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width


def test_colours_that_mean_something_stay_where_a_system_forces_its_own(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "forced-colors", "value": "active"}])
    colours = "[...document.querySelectorAll('.depths i')].map(i => getComputedStyle(i).backgroundColor)"
    assert len(set(browser.evaluate(colours))) == 8


def test_axe_would_have_found_it(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Proof that the two tests above can fail."""
    broken = tmp_path / "report.html"
    broken.write_text(
        page.read_text().replace('aria-label="Time line of', 'data-label="Time line of').replace("<title>", "<desc>"),
        "utf-8",
    )
    browser.open(broken)
    assert complaints(browser, runOnly=["svg-img-alt", "document-title"]) != []
