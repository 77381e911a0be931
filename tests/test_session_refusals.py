"""What `watch` refuses, in one line and before anything is opened or hooked."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from tests.monitoring import free_port
from tests.recipes import Decoder, forward
from torch import nn

import attnwatch
from attnwatch import Rule, UsageError, open_run
from attnwatch.monitor.outputs.log import LogOutput

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "expected every to be a whole number of at least 1, found 0"),
    ({"every": 2.0}, "expected every to be a whole number of at least 1, found 2.0"),
    ({"every": True}, "expected every to be a whole number of at least 1, found True"),
    ({"spectrum_every": 0}, "expected spectrum_every to be a whole number of at least 1, found 0"),
    ({"rows": 0}, "expected rows to be a whole number of at least 1, found 0"),
    ({"sequences": None}, "expected sequences to be a whole number of at least 1, found None"),
    ({"stop_on": "error"}, "expected stop_on to be one of info, warning, critical, found 'error'"),
    ({"optimizer": "adam"}, "expected optimizer to be a torch.optim.Optimizer, found str"),
    ({"rules": 5}, "expected rules to be a TOML file or a list of attnwatch.Rule, found 5"),
    ({"rules": ["x"]}, "expected rules to be a TOML file or a list of attnwatch.Rule, found ['x']"),
    ({"rules": "nowhere.toml"}, "nowhere.toml: expected a file of rules, found No such file or directory"),
    ({"rules": [Rule("r", "info", "entropi > 1")]}, "rule 'r', when: "),
    ({"outputs": print}, "expected outputs to be a list of objects with write(update) and close(), found <built-in "),
    ({"outputs": [1]}, "expected outputs to be a list of objects with write(update) and close(), found [1]"),
    ({"outputs": [LogOutput]}, "expected outputs to be a list of objects with write(update) and close(), found [<cla"),
    ({"spectrum_layers": 0}, "expected spectrum_layers to be a whole number of at least 1, found 0"),
    ({"every_row": 1}, "expected every_row to be True or False, found 1"),
    ({"merge": "all"}, 'expected merge to be "ranks" or "none", found \'all\''),
    ({"budget": 0}, "expected budget to be a share of the training time between 0 and 1, 0.01 say, found 0"),
    ({"budget": 1.5}, "expected budget to be a share of the training time between 0 and 1, 0.01 say, found 1.5"),
    ({"budget": "1%"}, "expected budget to be a share of the training time between 0 and 1, 0.01 say, found '1%'"),
    ({"prometheus": 70000}, "prometheus: expected a port from 0 to 65535, found 70000"),
]


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS, ids=[next(iter(o)) for o, _ in BAD_OPTIONS])
def test_a_wrong_option_is_one_line_and_leaves_nothing(
    options: dict[str, Any], text: str, model: Decoder, run: Path
) -> None:
    with pytest.raises(UsageError) as error:
        attnwatch.watch(model, run=run, **options)
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)
    assert not run.exists()
    assert not any(module._forward_hooks for module in model.modules())


def test_what_holds_no_attention_is_refused(run: Path) -> None:
    for wrong, found in (([1], "found list"), (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "found none in Sequential")):
        with pytest.raises(UsageError, match=found):
            attnwatch.watch(wrong, run=run)  # type: ignore[arg-type]
    assert not run.exists()


def test_a_rule_file_with_a_mistake_is_refused(model: Decoder, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\nname = "r"\nseverity = "info"\nwhen = "entropy <"\n')
    with pytest.raises(UsageError, match=r"rules\.toml: rule 'r', when: "):
        attnwatch.watch(model, run=run, rules=file)
    assert not run.exists()


@pytest.mark.parametrize(
    "mistake",
    [
        'when = "entropi > 1"',
        'when = "1 > 2"',
        'when = "loss > 1"\nscope = "head"',
        'when = "loss > 1"\nsummary = "{no}"',
    ],
)
def test_a_rule_that_does_not_fit_the_metrics_names_its_file(
    mistake: str, model: Decoder, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(f'[[rule]]\nname = "r"\nseverity = "info"\n{mistake}\n')
    for given in (file, str(file)):
        with pytest.raises(UsageError) as error:
            attnwatch.watch(model, run=run, rules=given)
        assert str(error.value).startswith(f"{file}: rule 'r', ")
    assert not run.exists()


@pytest.mark.parametrize("wrong", [5, "", "a\0b", b"run", ["run"]])
def test_what_is_no_path_is_one_line(
    wrong: Any, model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call, what in ((lambda: attnwatch.watch(model, run=wrong), "run"), (lambda: open_run(wrong), "a run")):
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value) == f"expected {what} to be the path of a directory, found {wrong!r}; pass its name"
    assert list(tmp_path.iterdir()) == []


def test_no_rules_are_rules_too(model: Decoder, run: Path) -> None:
    with attnwatch.watch(model, run=run, rules=[], report=False) as monitor:
        forward(model)
        monitor.step(loss=float("nan"))
    assert monitor.alerts == []
    assert open_run(run).header["rules"] == []


def test_a_used_run_directory_is_refused_and_the_port_freed(model: Decoder, run: Path) -> None:
    attnwatch.watch(model, run=run, report=False).close()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    port = free_port()
    with pytest.raises(UsageError, match="expected a new or empty directory"):
        attnwatch.watch(model, run=run, prometheus=port)
    socket.create_server(("127.0.0.1", port)).close()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_place_where_nothing_can_be_written_is_refused(place: str, model: Decoder, tmp_path: Path) -> None:
    """Below a file; in a file system in which nobody may make a directory."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^expected a new or empty directory at '.*run', found: .*; pass another"):
        attnwatch.watch(model, run=tmp_path / place)


@pytest.mark.parametrize("merge", ["ranks", "none"])
def test_processes_that_do_not_know_of_each_other_yet_are_told_how(
    merge: str, model: Decoder, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun has started two, and init_process_group comes after watch(): the second finds the run taken."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with attnwatch.watch(model, run=run, report=False, merge=merge) as monitor:
        forward(model)
        monitor.step()
        with pytest.raises(UsageError, match=r"a directory with run.json; .*init_process_group before watch"):
            attnwatch.watch(model, run=run, merge=merge)
    assert [problem.where for problem in open_run(run).problems] == (["ranks"] if merge == "ranks" else [])
