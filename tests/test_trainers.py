"""docs/trainers.md runs, block after block, and a library that is missing is missed in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tests import tiny
from torch.utils.data import DataLoader

from attnwatch import open_run

PAGE = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps one state for all accelerators of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run_block(title: str, names: dict[str, Any]) -> dict[str, Any]:
    """What the names are after the Python of a section, as a reader types it."""
    found = re.search(rf"^## {title}\n.*?^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    exec(compile(found[1], f"docs/trainers.md, {title}", "exec"), names)
    return names


def rows(count: int = 100) -> Any:
    return DataLoader(tiny.texts(count), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # its default, on a machine without an accelerator
def test_its_example_for_the_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_block("Hugging Face Trainer", {"model": tiny.llama(), "rows": tiny.texts(100)})
    run = open_run("runs/trainer")
    assert run.steps.tolist() == [1, 21]
    assert run.scalar("loss")[0].tolist() == list(range(1, 22))
    assert run.scalar("grad_norm")[0].tolist() == [10, 20]
    assert names["callback"].monitor.problems == []


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loggers, loaders and workers
def test_its_example_for_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Module(import_module("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.llama()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    names = run_block("Lightning", {"module": Module(), "loader": rows()})
    run = open_run("runs/lightning")
    assert run.steps.tolist() == [1, 21]
    assert run.scalar("loss")[0].tolist() == list(range(1, 22))
    assert names["callback"].monitor.problems == []


def test_its_example_for_accelerate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run_block("Accelerate", {"model": model, "optimizer": optimizer, "loader": rows()})
    run = open_run("runs/accelerate")
    assert run.steps.tolist() == [0, 20]
    assert run.scalar("loss")[0].tolist() == list(range(25))
    assert run.problems == ()


class Trainer:
    """A loop of torchtitan's shape: two model parts one after the other, two micro-batches a step, validation in
    between, metrics at every second step."""

    def __init__(self, config: dict[str, Any]):
        layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        self.model_parts = torch.nn.ModuleList(layers).train()
        self.optimizers = torch.optim.SGD(self.model_parts.parameters(), lr=0.01)
        self.logged: list[tuple[int, dict[str, float]]] = []
        logger = SimpleNamespace(log=lambda metrics, step: self.logged.append((step, metrics)), close=lambda: None)
        self.metrics_processor = SimpleNamespace(logger=logger)
        self.steps, self.step = config["steps"], 0
        self.closed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.model_parts:
            x = part(x)
        return x.square().mean()

    def train_step(self, data_iterator: Iterator[torch.Tensor]) -> None:
        self.optimizers.zero_grad()
        losses = []
        for _ in range(2):
            loss = self.forward(next(data_iterator)) / 2
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model_parts.parameters(), 1.0)
        self.optimizers.step()
        if self.step % 2 == 0:
            loss_and_more = {"loss_metrics/global_avg_loss": float(sum(losses)), "throughput(tps)": 1.0}
            self.metrics_processor.logger.log({**loss_and_more, "grad_norm": float(norm)}, self.step)

    def validate(self, x: torch.Tensor) -> None:
        for part in self.model_parts:
            part.eval()
        with torch.no_grad():
            self.metrics_processor.logger.log({"validation_metrics/loss": float(self.forward(x))}, self.step)
        for part in self.model_parts:
            part.train()

    def train(self) -> None:
        data = iter(torch.randn(2 * self.steps, 3, 8, 16, generator=torch.Generator().manual_seed(0)))
        while self.step < self.steps:
            self.step += 1
            self.train_step(data)
            self.validate(torch.zeros(1, 8, 16))

    def close(self) -> None:
        self.closed = True


def test_its_recipe_for_loops_like_torchtitans_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor for each part, the trainer's own step numbers and logged numbers; validation is passed on and not
    measured."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    watched = run_block("torchtitan, and loops like it", {"Trainer": Trainer})["WatchedTrainer"]
    trainer = watched({"steps": 21})
    trainer.train()
    trainer.close()
    assert trainer.closed
    expected = {step: metrics for step, metrics in trainer.logged if "grad_norm" in metrics}
    assert list(expected) == list(range(2, 22, 2))
    for part in (0, 1):
        run = open_run(f"runs/titan/part{part}")
        assert run.ended
        assert run.problems == ()
        assert run.steps.tolist() == [1, 21]
        assert run.layers == ("self_attn",)
        for name, theirs in (("loss", "loss_metrics/global_avg_loss"), ("grad_norm", "grad_norm")):
            steps, values = run.scalar(name)
            assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == {
                step: metrics[theirs] for step, metrics in expected.items()
            }


@pytest.mark.parametrize(
    ("name", "libraries", "extra"),
    [
        ("huggingface", ["transformers"], "hf"),
        ("lightning", ["lightning", "pytorch_lightning"], "lightning"),
        ("accelerate", ["accelerate"], "accelerate"),
    ],
)
def test_a_missing_library_is_missed_in_one_line(
    name: str, libraries: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what to install. `None` is how Python notes that a module is not there."""
    for module in [*libraries, *sys.modules]:
        if module.split(".")[0] in libraries:
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"attnwatch.monitor.trainers.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"expected {libraries[0]} to be installed.*attnwatch\[{extra}\]") as error:
        import_module(f"attnwatch.monitor.trainers.{name}")
    assert "\n" not in str(error.value)
