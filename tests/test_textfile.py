"""A textfile that two runs write: each is told, and neither takes the other's away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.made_updates import METRICS, full_update, parsed

from attnwatch.monitor.outputs import textfile
from attnwatch.monitor.outputs.textfile import TextfileOutput


def test_a_textfile_of_two_runs_is_named_to_both(
    tmp_path: Path, wait_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to close leaves the file to the other, which takes it away in the end."""
    monkeypatch.setattr(textfile, "EVERY", 0.01)
    file = tmp_path / "gpt.prom"
    outputs = [TextfileOutput(METRICS, file, labels={"job": job}) for job in "ab"]
    told: list[str | None] = [None, None]

    def both_told() -> bool:
        for at, output in enumerate(outputs):
            told[at] = output.write(full_update(("h.0",))) or told[at]
        return None not in told

    wait_for(both_told, "both to be told")
    assert told == [f"{str(file)!r} is written by another run too: give each a file of its own"] * 2
    first, second = outputs

    def is_seconds() -> bool:
        second.write(full_update(("h.0",)))
        return set(parsed(file.read_text())["attnwatch_finished"]) == {("b",)}

    first._end()
    wait_for(is_seconds, "the file to be the second run's")
    first.discard()
    assert set(parsed(file.read_text())["attnwatch_finished"]) == {("b",)}
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_one_run_is_told_nothing(tmp_path: Path, wait_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier run that was killed has left its file."""
    monkeypatch.setattr(textfile, "EVERY", 0.01)
    file = tmp_path / "gpt.prom"
    file.write_text("attnwatch_step 7\n")
    output = TextfileOutput(METRICS, file)
    for label in range(5):
        assert output.write(full_update((f"h.{label}",))) is None
        wait_for(lambda: f'layer="h.{label}"' in file.read_text(), "the update")  # noqa: B023
    output.close()
    assert output.write(full_update(("h.0",))) is None
