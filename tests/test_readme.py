"""The README runs, and its lists are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import vision  # noqa: F401 (before transformers)
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import attnwatch
from attnwatch.hooks.layers import METRICS
from attnwatch.monitor.rules import Engine, load_rules
from attnwatch.monitor.sample import Metric

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOUSE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


class Model(nn.Module):
    """One attention layer; answers with an object that has a loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, batch: Tensor) -> Any:
        q, k, v = (p(batch).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return CausalLMOutput(loss=F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean())


class Mixer(nn.Module):
    """Attention with a sigmoid: nothing that is seen without being told."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return (torch.sigmoid(q @ k.mT * 8**-0.5) @ v).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # of a Trainer on a machine without an accelerator
def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader would type them; only the port is one that is free. Those of docs/trainers.md, and
    the list of all outputs, run with their pages (test_trainers.py, test_outputs_page.py)."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {
        "model": model,
        "rows": [{"batch": torch.randn(12, 16)} for _ in range(8)],
        "loader": [torch.randn(2, 12, 16) for _ in range(21)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "mixer": Mixer(),
        "x": torch.randn(2, 12, 16),
    }
    trainers = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    here = [block for block in blocks("python") if block not in trainers and "WandbOutput" not in block]
    assert (len(here), len(blocks("python"))) == (5, 8)
    for block in here:
        exec(compile(block.replace("9464", "0"), "README.md", "exec"), names)
    run = names["run"]
    assert run.steps.tolist() == [0, 20]
    assert run.metric("entropy_ratio").shape == (2, 1, 2)
    assert [layer.state for layer in run.coverage] == ["verified"]
    assert len(names["loss"]) == 21
    assert {path.name for path in (tmp_path / "runs" / "gpt").iterdir()} >= {"run.json", "samples", "report.html"}
    assert attnwatch.open_run("runs/trainer").steps.tolist() == [1, 21]  # the trainer counts from 1
    assert [layer.state for layer in names["monitor"].coverage] == ["verified"]
    assert names["attnwatch"] is attnwatch


def test_its_rule_is_a_rule(tmp_path: Path) -> None:
    (block,) = blocks("toml")
    (tmp_path / "rules.toml").write_text(block)
    rules = load_rules(tmp_path / "rules.toml")
    assert [rule.name for rule in rules] == ["sinks_everywhere"]
    Engine(rules, [Metric(*metric) for metric in METRICS])


def test_the_house_names_every_file_and_nothing_else() -> None:
    listed = re.findall(r"^\| `((?:hooks|monitor|reports|src|benchmarks|docs)/[^`]*[^/`])` \|", HOUSE, re.MULTILINE)
    found = [
        path.relative_to(ROOT).as_posix()
        for room in ("hooks", "monitor", "reports", "src/attnwatch", "benchmarks", "docs")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "detection"
        and not (room == "src/attnwatch" and path.parent != ROOT / room)  # seen once, at the root
    ]  # fmt: skip
    assert sorted(listed) == sorted(found)


def test_every_metric_and_every_rule_is_in_it() -> None:
    named = set(re.findall(r"`(\w+)`", README))
    assert {metric.name for metric in METRICS} - named == set()
    rules = section_rows("The rules")
    assert [(name, severity) for name, severity in rules] == [(rule.name, rule.severity) for rule in load_rules()]


def section_rows(title: str) -> list[tuple[str, str]]:
    """Name and severity of each rule of the table; a row may stand for several."""
    text = README.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([a-z, ]+) \|", text, re.MULTILINE)
    return [
        pair
        for names, severities in rows
        for pair in zip(re.findall(r"`(\w+)`", names), severities.split(", "), strict=True)
    ]
