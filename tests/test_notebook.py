"""What Jupyter shows of a monitor and of a run, in a real kernel and a real browser; and runs as data frames."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from tests.browser import Browser
from tests.made_runs import alert, header
from tests.made_samples import NAN, sample
from tests.pages import Page

import attnwatch
from attnwatch.monitor.card import card
from attnwatch.monitor.run import Run
from attnwatch.monitor.sample import Coverage, Problem, UsageError
from attnwatch.monitor.store import RunWriter

COVERAGE = (Coverage("layer0", "verified"), Coverage("layer1", "uncovered"))
HOSTILE = '<script>alert("x")</script>&\n\u202e\ud800'
TRAIN = """
import torch, torch.nn.functional as F, attnwatch
from tests.recipes import Decoder, Attention, fused, TOKENS
torch.manual_seed(0)
model = Decoder(lambda: Attention(fused))
monitor = attnwatch.watch(model, run="run", every=1)
tokens = torch.randint(TOKENS, (3, 13))
loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
loss.backward()
monitor.step(loss=loss)
"""


def shown(**changes: object) -> str:
    fields: dict[str, object] = {
        "title": "attnwatch", "now": "step 7", "coverage": COVERAGE, "alerts": (), "sample": None, "problems": (),
    }  # fmt: skip
    return card(**(fields | changes))  # type: ignore[arg-type]


# --- the card ---------------------------------------------------------------------------------------------------------


def test_it_says_where_it_stands_what_fires_and_what_does_not_work() -> None:
    fired, over = alert(), alert("logit_growth", state="resolved", resolved_step=600)
    text = Page(shown(alerts=(over, fired), problems=(Problem(3, "h.2", "no call seen"),))).text
    assert "attnwatch step 7" in text
    assert "1 of 2 attention layers verified, 1 uncovered (layer1)" in text
    assert "critical: sparse_low_rank at model since step 540. 29 % of all heads" in text
    assert "problem: h.2: no call seen" in text
    assert "logit_growth" not in text
    assert "no alert is firing" in Page(shown(alerts=(over,))).text


def test_the_newest_numbers_are_mean_least_and_largest_over_the_heads_of_each_layer() -> None:
    """Heads of 0.1 and 0.4 in layer0; nothing of layer1; `bound_use` and what was not measured at all are left out."""
    values = {(0, 0): {"entropy_ratio": 0.1}, (0, 1): {"entropy_ratio": 0.4}, (1, 0): {}, (1, 1): {}}
    page = Page(shown(sample=sample(40, heads=values, layers=2, width=2)))
    assert "Step 40: mean over the heads (least to largest)" in page.text
    assert page.text.endswith("layer entropy_ratio layer0 0.25 (0.1 to 0.4) layer1 - ")
    assert "layer" not in Page(shown(sample=sample(40, heads={(0, 0): {}}, layers=1, width=1), coverage=())).text


def test_a_cell_is_shaded_by_its_share_of_the_largest_mean() -> None:
    values = {(i, 0): {"logit_max": x} for i, x in enumerate((1e3, 1.5e3, 2e3, np.inf))}
    page = shown(sample=sample(0, heads=values, layers=4, width=1))
    assert "1,500 (1,500 to 1,500)" in Page(page).text
    assert [page.split("rgba(224,128,72,")[i + 1][:4] for i in range(4)] == ["0.23", "0.34", "0.45", "0.00"]


def test_many_alerts_are_cut_and_counted() -> None:
    page = Page(shown(alerts=tuple(alert(f"rule{i}") for i in range(11)))).text
    assert "rule7" in page
    assert "rule8" not in page
    assert "and 3 more" in page


def test_layers_without_a_row_are_counted() -> None:
    heads = {(i, 0): {"entropy_ratio": 0.1} for i in range(203)}
    page = Page(shown(sample=sample(0, heads=heads, layers=203, width=1))).text
    assert "layer199 0.1 (0.1 to 0.1) and 3 more layers" in page
    assert (
        "more layers"
        not in Page(shown(sample=sample(0, heads={(0, 0): {"entropy_ratio": 1}}, layers=200, width=1))).text
    )


def test_a_hostile_name_is_text() -> None:
    made = sample(0, layers=1)
    page = shown(
        title=HOSTILE, now=HOSTILE, coverage=(Coverage(HOSTILE, "uncovered"),),
        alerts=(alert(place=HOSTILE, summary=HOSTILE),), problems=(Problem(0, HOSTILE, HOSTILE),),
        sample=replace(made, layers=(HOSTILE,)),
    )  # fmt: skip
    page.encode()
    tags = {name for name, _ in Page(page).tags}
    assert tags <= {"div", "b", "span", "ul", "li", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert Page(page).text.count('<script>alert("x")</script>&\\n\\u202e\\ud800') == 8


# --- in Jupyter -------------------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_monitor_and_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel runs the cells; what they show is what a browser gets to see."""
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    cells = [TRAIN, "monitor", 'monitor.close()\nattnwatch.open_run("run")']
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    during, after = (cell.outputs[-1].data["text/html"] for cell in notebook.cells[1:])
    run = attnwatch.open_run(tmp_path / "run")
    mean = float(run.metric("entropy_ratio")[0, 0].astype(float).mean())
    for page in (during, after):
        text = Page(page).text
        assert "2 of 2 attention layers verified" in text
        assert f"blocks.0.attention {mean:.3g} (" in text
    assert "next sampled step 1" in Page(during).text
    assert "1 samples, steps 0 to 0, ended, in " in Page(after).text
    assert after == run._repr_html_().replace(str(run.path), "run")


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_readably(dark: bool, tmp_path: Path, collapsed: Run) -> None:
    """No complaint, no request, no text that a page's own width cuts off; text is of the page's own colour."""
    page = tmp_path / "page.html"
    scheme = '<meta charset="utf-8"><title>x</title><link rel="icon" href="data:,">'
    page.write_text(
        f'<!doctype html><html lang="en">{scheme}<body style="color-scheme:light dark">{collapsed._repr_html_()}'
    )
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, dark=dark)
        assert (browser.complaints, browser.requests) == ([], [])
        colours = browser.evaluate(
            "[...new Set([...document.querySelectorAll('body *')].map(x => getComputedStyle(x).color))]"
        )
        assert colours == [browser.evaluate("getComputedStyle(document.body).color")]
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        rows = browser.evaluate("document.querySelectorAll('tbody tr').length")
        assert rows == len(collapsed.layers)


# --- data frames ------------------------------------------------------------------------------------------------------


def test_samples_are_a_row_for_each_head_and_step(collapsed: Run) -> None:
    frame = collapsed.to_pandas()
    steps, layers, heads = len(collapsed.steps), len(collapsed.layers), collapsed.heads
    assert list(frame.columns) == ["step", "layer", "head", *(metric.name for metric in collapsed.metrics)]
    assert len(frame) == steps * layers * heads
    for metric in ("entropy_ratio", "qk_rank_ratio"):
        table = frame.pivot(index="step", columns=["layer", "head"], values=metric)
        assert table.index.tolist() == collapsed.steps.tolist()
        for number, layer in enumerate(collapsed.layers):
            np.testing.assert_array_equal(table[layer].to_numpy(), collapsed.metric(metric)[:, number])


def test_heads_that_do_not_exist_have_no_row_and_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    metrics = ("logit_max", "entropy")
    writer = RunWriter(tmp_path / "run", header(metrics))
    values = np.array([[[1, 2], [3, NAN]], [[NAN, 5], [6, NAN]]], np.float32)  # [M, L, H]
    writer.sample(attnwatch.Sample(4, 0.0, metrics, ("wide", "narrow"), values))
    writer.scalars(4, {"loss": 2.5})
    writer.scalars(3, {"lr": 0.1})
    writer.scalars(5, {"loss": 2.0, "lr": 0.2})
    writer.close()
    run = attnwatch.open_run(tmp_path / "run")
    frame = run.to_pandas()
    rows = [(4, "wide", 0, 1.0, None), (4, "wide", 1, 2.0, 5.0), (4, "narrow", 0, 3.0, 6.0)]
    assert frame.astype(object).where(frame.notna(), None).values.tolist() == [list(row) for row in rows]
    scalars = run.to_pandas("scalars")
    assert scalars.columns.tolist() == ["step", "loss", "lr"]
    np.testing.assert_array_equal(scalars, [[3, NAN, 0.1], [4, 2.5, NAN], [5, 2.0, 0.2]])
    assert run.to_pandas("alerts").columns.tolist()[:4] == ["rule", "severity", "state", "place"]


def test_alerts_are_a_row_each(collapsed: Run) -> None:
    frame = collapsed.to_pandas("alerts")
    assert frame["rule"].tolist() == [each.rule for each in collapsed.alerts]
    assert frame["fired_step"].tolist() == [each.fired_step for each in collapsed.alerts]
    assert frame["resolved_step"].isna().tolist() == [each.resolved_step is None for each in collapsed.alerts]


def test_an_empty_run_has_empty_frames_and_a_card(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", header(("entropy",))).close()
    run = attnwatch.open_run(tmp_path / "run")
    assert run.last is None
    assert [len(run.to_pandas(what)) for what in ("samples", "scalars", "alerts")] == [0, 0, 0]
    assert run.to_pandas().columns.tolist() == ["step", "layer", "head", "entropy"]
    assert "0 samples, not ended" in Page(run._repr_html_()).text


def test_another_frame_is_refused_by_name(collapsed: Run) -> None:
    with pytest.raises(
        UsageError, match=r"^expected a frame of this run, found 'heads'; there are: samples, scalars, al"
    ):
        collapsed.to_pandas("heads")


def test_without_pandas_it_says_what_to_install(collapsed: Run) -> None:
    code = f"""
import sys, attnwatch
sys.modules["pandas"] = None
attnwatch.open_run({str(collapsed.path)!r}).to_pandas()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ImportError: expected pandas to be installed, found: ")
    assert done.stderr.endswith("; pip install attnwatch[pandas]\n")
