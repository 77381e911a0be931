"""The pages in docs/ say what the code does: tables are generated, formulas complete, examples valid, links alive."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from attnwatch.hooks.layers import METRICS
from attnwatch.monitor.conditions import parse
from attnwatch.monitor.outputs.alerting import JOB, prometheus_rules
from attnwatch.monitor.outputs.exposition import SERIES, head_series
from attnwatch.monitor.outputs.prometheus import Prometheus
from attnwatch.monitor.rules import Rule, load_rules
from attnwatch.monitor.sample import SCALARS, Metric

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
PAGES = ("metrics.md", "rules.md", "prometheus.md")


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """From a heading to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title!r}"
    return found[1]


@pytest.mark.parametrize("name", PAGES)
def test_every_table_is_what_the_code_generates(name: str) -> None:
    """After a change of a metric, rule or series: `python docs/generate.py`."""
    assert GENERATE["filled"](read(name)) == read(name)


def test_a_stale_table_is_written_anew_and_the_text_around_it_stays() -> None:
    page = "before\n<!-- table: functions -->\n| stale |\n<!-- end -->\nafter\n"
    filled = GENERATE["filled"](page)
    assert "stale" not in filled
    assert filled.startswith("before\n<!-- table: functions -->\n| function | gives |\n")
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert "| `slope(x, n)` |" in filled


def test_every_table_stands_in_a_page() -> None:
    marked = [name for page in PAGES for name in re.findall(r"<!-- table: (.*?) -->", read(page))]
    assert sorted(marked) == sorted(GENERATE["TABLES"])


def test_every_metric_has_its_formula() -> None:
    """A heading of its own with some words below it, in the order of the table, and none for what does not exist."""
    page = read("metrics.md")
    names = [metric.name for metric in METRICS]
    assert re.findall(r"^### `(\w+)`$", page, re.MULTILINE) == names
    assert [name for name in names if len(section(page, f"`{name}`").split()) < 1] == []


def test_every_key_of_a_rule_is_explained_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", section(read("rules.md"), "Keys of a rule"), re.MULTILINE)
    shown = {MISSING: "", None: "", "": "", "model": "`model`"}
    expected = {field.name: shown.get(field.default, str(field.default)) for field in fields(Rule)}
    assert {name: default for name, default, _ in rows} == expected


def test_the_example_conditions_are_conditions() -> None:
    names = [*(metric.name for metric in METRICS), *SCALARS]
    examples = re.findall(r"^    (.+)$", section(read("rules.md"), "The condition language"), re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        assert parse(example, names).names


def test_every_series_that_the_page_speaks_of_exists() -> None:
    exist = {series.name for series in SERIES} | {f"attnwatch_{metric.name}" for metric in METRICS}
    spoken = set(re.findall(r"attnwatch_\w+", read("prometheus.md")))
    assert exist <= spoken
    assert spoken - exist <= {head_series(Metric(*metric)).name for metric in METRICS}


def test_every_option_of_the_exporter_is_explained_with_its_default() -> None:
    table = read("prometheus.md").partition("| option |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| .+ \|$", table, re.MULTILINE)
    shown = {None: "", "127.0.0.1": '`"127.0.0.1"`', False: "`False`", 15.0: "15", MISSING: ""}
    expected = {field.name: shown.get(field.default, str(field.default)) for field in fields(Prometheus)}
    assert dict(rows) == expected


def test_prometheus_takes_the_configuration(program: Callable[[str], str], tmp_path: Path) -> None:
    """With the rules that it speaks of."""
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", read("prometheus.md"), re.DOTALL | re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "attnwatch.yml").write_text(prometheus_rules(load_rules()))
    check = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    run = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(load_rules()) + len(JOB)} rules found" in run.stdout


@pytest.mark.parametrize("path", [ROOT / "README.md", *(DOCS / name for name in PAGES)], ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.is_file(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target
