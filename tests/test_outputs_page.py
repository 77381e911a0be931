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


def test_its_python_runs(tmp_path: Path) -> None:
    """In one process, as a reader would type it; the loss is NaN at first, so that there is an alert to tell of."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    offline = {
        "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path),
        "WANDB_CACHE_DIR": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path),
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with Receiver() as receiver:
        offline["ATTNWATCH_WEBHOOK"] = f"http://{receiver.host}/hook"
        script = "\n".join([BEFORE, *blocks])
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | offline, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (posted,) = receiver.posted
    assert posted.json["text"].startswith("[hooked] critical: loss_divergence at model firing at step 0")
    assert str(tmp_path).encode() not in posted.body
    assert "0 loss_divergence firing\n" in done.stdout
    for name in ("hooked", "wandb", "board", "mlflow", "trackio", "own"):
        run = attnwatch.open_run(tmp_path / "runs" / name)
        assert (run.ended, [p for p in run.problems if "Output" in p.where]) == (True, []), name
    assert list((tmp_path / "runs" / "board-events").iterdir())
    assert list((tmp_path / "mlruns").rglob("report.html"))


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_named(style: str) -> None:
    assert f'`"{style}"`' in PAGE


def test_every_link_leads_to_a_page() -> None:
    assert [link for link in re.findall(r"\]\(([\w.]+)\)", PAGE) if not (ROOT / "docs" / link).exists()] == []
