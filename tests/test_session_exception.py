"""What an exception inside `with attnwatch.watch(...)` leaves: the run says so, and no exporter calls it finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.made_updates import fetch, parsed
from torch import nn

import attnwatch
from attnwatch.monitor.outputs.prometheus import PrometheusOutput
from attnwatch.monitor.run import Run


def ended_by(error: BaseException, folder: Path) -> tuple[Run, PrometheusOutput]:
    """One step, a scrape, and the error. The run, and the exporter after its end."""
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.ones(1, 4, 16)
    settings = attnwatch.Prometheus(port=0, file_sd=folder / "targets.json", linger=0.0)
    exporters: list[PrometheusOutput] = []

    def train() -> None:
        with attnwatch.watch(model, run=folder / "run", every=1, prometheus=settings) as monitor:
            exporters.extend(each for each in monitor._journal.outputs if isinstance(each, PrometheusOutput))
            model(x, x, x)[0].sum().backward()
            monitor.step(loss=1.0)
            assert parsed(fetch(exporters[0].port))["attnwatch_finished"] == {(): 0}
            raise error

    with pytest.raises(type(error)):
        train()
    assert not (folder / "targets.json").exists()
    return attnwatch.open_run(folder / "run"), exporters[0]


def test_an_exception_is_recorded_and_the_exporter_goes_without_a_word(tmp_path: Path) -> None:
    """As after a kill: AttnwatchGone fires. The report is written and says what ended the run."""
    run, exporter = ended_by(RuntimeError("boom"), tmp_path)
    assert (run.ended, run.exception, exporter._exposition.finished) == (True, "RuntimeError", False)
    assert "Ended by an exception: RuntimeError" in (tmp_path / "run" / "report.html").read_text()


def test_leaving_on_purpose_is_an_end(tmp_path: Path) -> None:
    run, exporter = ended_by(SystemExit(0), tmp_path)
    assert (run.ended, run.exception, exporter._exposition.finished) == (True, "", True)


WITHOUT_WITH = """
import sys, torch, attnwatch
model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.ones(1, 4, 16)
monitor = attnwatch.watch(model, run=sys.argv[1], every=1)
model(x, x, x)[0].sum().backward()
monitor.step(loss=1.0)
"""


@pytest.mark.parametrize(("last", "blamed"), [("raise OSError('gone')", "OSError"), ("sys.exit(3)", ""), ("x = 1", "")])
def test_a_process_that_an_exception_ends_ends_its_runs_so(last: str, blamed: str, tmp_path: Path) -> None:
    """A loop without `with`, and the Trainer of Hugging Face, which tells its callbacks of no exception."""
    subprocess.run([sys.executable, "-c", WITHOUT_WITH + last, tmp_path / "run"], capture_output=True, timeout=120)
    run = attnwatch.open_run(tmp_path / "run")
    assert (run.ended, run.exception) == (True, blamed)
