"""The page in a real browser: it says nothing, asks for nothing, works without its script, and stays inert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests import made_runs
from tests.browser import Browser
from tests.pages import Page

from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage, Sample
from attnwatch.monitor.store import RunWriter, open_run
from attnwatch.reports import html, summary

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every text that a run holds tries to become part of the page."""
    path = tmp_path_factory.mktemp("runs") / "<script>alert(0)<"
    header = made_runs.header(("entropy_ratio",), **{HOSTILE: HOSTILE})
    header |= {"model": HOSTILE, "rules": [{**made_runs.RULES[0], "name": HOSTILE, "when": HOSTILE}]}
    header["metrics"] = [
        {"name": name, "unit": HOSTILE, "help": HOSTILE, "merge": "mean"} for name in ("entropy_ratio", HOSTILE)
    ]
    writer = RunWriter(path, header)
    made_runs.write_coverage(writer, [Coverage(HOSTILE, "uncovered", note=HOSTILE), Coverage("a", "verified")])
    for step in range(4):
        values = np.full((2, 2, 2), 0.1 * step, "f4")
        writer.sample(Sample(step, float(step), ("entropy_ratio", HOSTILE), (HOSTILE, "a"), values))
        writer.scalars(step, {"loss": 1.0, HOSTILE: 2.0})
    made_runs.write_alert(
        writer,
        made_runs.alert(
            HOSTILE, place=HOSTILE, pending_step=1, fired_step=2, heads=((HOSTILE, 1),), summary=HOSTILE,
            advice=HOSTILE, values={HOSTILE: 1.0, "entropy_ratio": 0.1},
        ),
    )  # fmt: skip
    writer.event(made_runs.event("problem", step=1, where=HOSTILE, text=HOSTILE))
    made_runs.write_end(writer, 4, 4)
    return open_run(path)


def test_hostile_names_stay_text(hostile: Run) -> None:
    page = Page(html.render([hostile]))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "{{ 7 * 7 }}" in page.text
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]


def test_names_that_turn_the_text_around_or_never_end_are_written_out_and_cut(tmp_path: Path) -> None:
    """Right-to-left marks, terminal escapes, 10,000 characters: of a run, a layer, a scalar, an alert."""
    marks, long = "a\u202eb\u2066\x1b[31m\u200f", "x" * 10_000
    path = tmp_path / f"run{marks.replace(chr(27), '')}"
    writer = RunWriter(path, made_runs.header(("entropy_ratio",)))
    made_runs.write_coverage(writer, [Coverage(name, "verified", 2, 2, 8) for name in (marks, long)])
    for step in range(4):
        values = np.full((1, 2, 2), 0.5, "f4")
        writer.sample(Sample(step, float(step), ("entropy_ratio",), (marks, long), values))
        writer.scalars(step, {"loss": 1.0, marks: 2.0})
    worst = made_runs.alert(place=marks, pending_step=1, fired_step=2, heads=((long, 1), (marks, 0)), summary=marks)
    made_runs.write_alert(writer, worst)
    made_runs.write_end(writer, 4, 4)
    run = open_run(path)
    source = html.render([run, run])
    assert not [mark for mark in "\u202e\u2066\x1b\u200f" if mark in source]
    page = Page(source)
    assert r"a\u202eb\u2066\x1b[31m\u200f" in page.text
    assert long[:101] not in summary.verdict(run)[1]
    assert long[:201] not in page.text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def lightness(browser: Browser) -> float:
    """Mean of the red, green and blue of the page's ground."""
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    return float(np.mean([int(part) for part in re.findall(r"\d+", colour)][:3]))


@pytest.mark.parametrize("dark", [False, True])
def test_browser_opens_the_page_without_a_word_or_a_request(
    browser: Browser, tmp_path: Path, collapsed: Run, healthy: Run, dark: bool
) -> None:
    browser.open(html.write_report([collapsed, healthy], tmp_path / "report.html"), dark=dark)
    assert browser.evaluate("document.querySelectorAll('svg.panel').length") > 40
    assert browser.screenshot().startswith(b"\x89PNG")
    assert (lightness(browser) < 60) == dark
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (browser.complaints, browser.requests) == ([], [])


def test_browser_moves_through_the_steps(browser: Browser, tmp_path: Path, collapsed: Run) -> None:
    """The slider starts at the main alert (540), goes where it is pulled and shows the frame of that step."""
    browser.open(html.write_report([collapsed], tmp_path / "report.html"))
    frame = "Number(document.querySelector('.maps').style.getPropertyValue('--frame'))"
    shown = "document.querySelector('.heats .player output').textContent"
    assert (browser.evaluate(shown), browser.evaluate(frame)) == ("step 540", 54)
    browser.evaluate(
        "s = document.querySelector('.heats input[type=range]'); s.value = 3; s.dispatchEvent(new Event('input'))"
    )
    assert (browser.evaluate(shown), browser.evaluate(frame)) == ("step 30", 3)
    top = "document.querySelector('.film img').getBoundingClientRect().top"
    ground = "document.querySelector('.film').getBoundingClientRect()"
    assert browser.evaluate(f"({top} - {ground}.top) / {ground}.height") == pytest.approx(-3, abs=0.01)
    browser.evaluate(
        "[...document.querySelectorAll('.player button')].find(b => b.textContent === 'Divergence').click()"
    )
    assert browser.evaluate(shown) == "step 680"
    browser.evaluate(
        "c = document.querySelector('select'); c.value = 'logit_max'; c.dispatchEvent(new Event('change'))"
    )
    visible = "[...document.querySelectorAll('.heat')].filter(h => h.offsetWidth).map(h => h.dataset.metric)"
    assert browser.evaluate(visible) == ["logit_max"]
    browser.evaluate("c.value = 'key_norm_max'; c.dispatchEvent(new Event('change'))")
    assert browser.evaluate(visible) == ["key_norm_max"]  # from the folded maps
    assert browser.complaints == []


def test_browser_reads_the_value_under_the_pointer(browser: Browser, tmp_path: Path, collapsed: Run) -> None:
    """The middle of the first map's first cell: layer 0, head 0 at step 540, to the scale's precision."""
    browser.open(html.write_report([collapsed], tmp_path / "report.html"))
    browser.evaluate("document.querySelector('.map').scrollIntoView({block: 'center'})")
    place = browser.evaluate("(({x, y}) => ({x, y}))(document.querySelector('.map').getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 8, y=place["y"] + 5)
    text = browser.evaluate("document.querySelector('.heats .readout').textContent")
    found = re.fullmatch(r"blocks\.0\.attention, head 0: entropy_ratio about (\S+)", text)
    assert found
    truth = float(collapsed.metric("entropy_ratio")[collapsed.steps.tolist().index(540), 0, 0])
    assert float(found[1]) == pytest.approx(truth, abs=0.8 / 62 + 0.005)


def test_on_a_telephone_what_is_too_wide_scrolls_and_shows_it(
    browser: Browser, tmp_path: Path, collapsed: Run, healthy: Run
) -> None:
    """Nothing is cut: what reaches beyond the page stands in a box that scrolls, with a shadow where more is hidden."""
    for runs, width in (([collapsed], 320), ([collapsed], 390), ([collapsed, healthy], 390)):
        browser.open(html.write_report(runs, tmp_path / "report.html"), width=width)
        browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        wide = (
            "[...document.querySelectorAll('svg, table, dl, .maps')]"
            f".filter(n => n.getBoundingClientRect().right > {width})"
        )
        assert browser.evaluate(f"{wide}.length") > 5
        assert browser.evaluate(f"{wide}.filter(n => !n.closest('.scroll, details')).length") == 0
        box = "getComputedStyle(document.querySelector('.timeline').closest('.scroll'))"
        assert browser.evaluate(f"{box}.overflowX") == "auto"
        assert browser.evaluate(f"{box}.backgroundAttachment") == "local, local, scroll, scroll"


def test_page_is_readable_without_javascript(browser: Browser, tmp_path: Path, collapsed: Run) -> None:
    browser.open(html.write_report([collapsed], tmp_path / "report.html"), javascript=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.evaluate("document.querySelectorAll('.player, .readout, .copy').length") == 0
    hidden = (
        "[...document.querySelectorAll('section, svg.panel, svg.timeline, .map, .film img')].filter(n => !n.offsetWidth"
    )
    assert browser.evaluate(f"{hidden} && !n.getBoundingClientRect().width).length") == 0
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('.maps')).getPropertyValue('--frame').trim()") == "54"
    )


def test_page_prints(browser: Browser, tmp_path: Path, collapsed: Run) -> None:
    browser.open(html.write_report([collapsed], tmp_path / "report.html"))
    document = browser.pdf()
    assert document.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", document)) <= 12


def test_nothing_is_cut_off_on_paper(browser: Browser, tmp_path: Path, collapsed: Run, healthy: Run) -> None:
    """On A4 (703 pixels between the margins): no table or picture reaches beyond the page."""
    browser.open(html.write_report([collapsed, healthy], tmp_path / "report.html"), width=703)
    browser.call("Emulation.setEmulatedMedia", media="print")
    beyond = browser.evaluate(
        "[...document.querySelectorAll('table, svg, img, p')].filter(n => !n.closest('details:not([open])') && "
        "n.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(n => n.outerHTML.slice(0, 90))"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    assert beyond == []


def test_browser_runs_nothing_that_a_run_brought_along(browser: Browser, tmp_path: Path, hostile: Run) -> None:
    browser.open(html.write_report([hostile], tmp_path / "report.html"))
    assert (browser.complaints, browser.requests) == ([], [])
    assert browser.evaluate("document.querySelectorAll('script').length") == 1
    assert HOSTILE in browser.evaluate("document.body.textContent")


def test_policy_stops_a_script_that_is_not_the_pages_own(browser: Browser, tmp_path: Path, healthy: Run) -> None:
    """Proof that the policy bites, and that the tests above would hear of it."""
    page = tmp_path / "report.html"
    page.write_text(
        html.render([healthy]).replace("</main>", "<script>document.title = 'run'</script></main>"), "utf-8"
    )
    browser.open(page)
    assert browser.evaluate("document.title") != "run"
    assert any("Content Security Policy" in each for each in browser.complaints)
