"""docs/outputs.md runs, block after block, with the real libraries, and sends nothing but what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.receiver import Receiver

import attnwatch
from attnwatch.monitor.outputs.webhook import STYLES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "outputs.md").read_text(encoding="utf-8")
BEFORE = """
import os, torch, torch.nn.functional as F
from tests.recipes import Decoder, Attention, fused, TOKENS
torch.manual_seed(0)
model = Decoder(lambda: Attention(fused))

def train(monitor):
    for step in range(2):
        tokens = torch.randint(TOKENS, (3, 13))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        monitor.step(loss=loss if step else float("nan"))
    assert not [problem for problem in monitor.problems if "Output" in problem.where], monitor.problems
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def run_script(tmp_path: Path, *parts: str) -> tuple[str, Receiver]:
    """What it prints, in a process of its own without a network, and what it posted."""
    offline = {
        "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path),
        "WANDB_CACHE_DIR": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path),
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with Receiver() as receiver:
        offline["ATTNWATCH_WEBHOOK"] = f"http://{receiver.host}/hook"
        script = "\n".join([BEFORE, *parts])
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | offline, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, receiver


def test_its_python_runs(tmp_path: Path) -> None:
    """In one process, as a reader would type it; the loss is NaN at first, so that there is an alert to tell of."""
    assert len(blocks(PAGE)) == 7
    printed, receiver = run_script(tmp_path, *blocks(PAGE))
    (posted,) = receiver.posted
    assert posted.json["text"].startswith("[hooked] critical: loss_divergence at model firing at step 0")
    assert str(tmp_path).encode() not in posted.body
    assert "0 loss_divergence firing\n" in printed
    for name in ("hooked", "wandb", "board", "mlflow", "trackio", "own"):
        run = attnwatch.open_run(tmp_path / "runs" / name)
        assert (run.ended, [p for p in run.problems if "Output" in p.where]) == (True, []), name
    assert list((tmp_path / "runs" / "board-events").iterdir())
    assert list((tmp_path / "mlruns").rglob("report.html"))


def test_all_outputs_of_the_readme_work_at_once(tmp_path: Path) -> None:
    (listed,) = [block for block in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if "WandbOutput" in block]
    trackers = 'import mlflow, trackio, wandb\nwandb.init(project="gpt"); mlflow.start_run()\n'
    trackers += 'trackio.init(project="gpt", embed=False)\n'
    watch = 'with attnwatch.watch(model, run="runs/all", outputs=outputs) as monitor:\n    train(monitor)\n'
    _, receiver = run_script(tmp_path, "import attnwatch", trackers, listed, watch)
    assert len(receiver.posted) == 1
    run = attnwatch.open_run(tmp_path / "runs" / "all")
    assert (run.ended, [problem for problem in run.problems if "Output" in problem.where]) == (True, [])
    assert list((tmp_path / "runs" / "board").iterdir())
    assert list((tmp_path / "mlruns").rglob("report.html"))
    assert list((tmp_path / "trackio").iterdir())
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_named(style: str) -> None:
    assert f'`"{style}"`' in PAGE


def test_every_link_leads_to_a_page() -> None:
    assert [link for link in re.findall(r"\]\(([\w.]+)\)", PAGE) if not (ROOT / "docs" / link).exists()] == []
