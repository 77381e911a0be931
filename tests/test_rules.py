"""Reading rules: what a file gives, and what is said of a wrong one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from tests.made_samples import METRICS

from attnwatch.monitor.rules import Engine, Rule, load_rules
from attnwatch.monitor.sample import UsageError

GOOD = """
[[rule]]
name = "one"
severity = "info"
when = "logit_max > 5"
"""


def test_load(tmp_path: Path) -> None:
    """A file of rules; what it does not say has its default."""
    path = tmp_path / "rules.toml"
    path.write_text(GOOD + 'unless = "lr > 1"\nshare = 1\n', encoding="utf-8")
    assert load_rules(path) == (Rule("one", "info", "logit_max > 5", unless="lr > 1", share=1),)
    assert load_rules(str(path))[0].keep == 5


def test_default_rules_are_as_designed() -> None:
    """Names and severities; each has a summary and advice, and survives the way through a run's header."""
    rules = load_rules()
    assert {rule.name: rule.severity for rule in rules} == {
        "sparse_low_rank": "critical",
        "entropy_collapse": "warning",
        "benign_sparsity": "info",
        "sinks_lost": "info",
        "attention_uniform": "warning",
        "logit_growth": "info",
        "logit_growth_1e3": "warning",
        "logit_growth_1e4": "critical",
        "bound_reached": "info",
        "precision": "warning",
        "nonfinite": "critical",
        "loss_divergence": "critical",
        "uncovered_layers": "warning",
    }
    assert all(rule.summary and rule.advice for rule in rules)
    assert tuple(Rule(**asdict(rule)) for rule in rules) == rules


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", ["[[rule]]", "found nothing"]),
        ("rule = 3", ["[[rule]]", "'rule'"]),
        ("rule = [3]", ["[[rule]]"]),
        (GOOD + "[other]\n", ["nothing else at the top", "'other'"]),
        ("[[rule]", ["TOML", "line 1"]),
        (GOOD + GOOD, ["'one'", "different names", "2 times"]),
        (GOOD + 'whne = "a"', ["'one'", "'whne'", "(closest first): when"]),
        ('[[rule]]\nname = "one"\nwhen = "loss > 1"', ["'one'", "'severity'", "found name, when"]),
        ('[[rule]]\nwhen = "loss > 1"', ["rule number 1", "'name'"]),
        (GOOD.replace('"one"', "7"), ["name", "a short name", "7"]),
        (GOOD.replace('"one"', '"a\\nb"'), ["name", "a short name", "'a\\nb'"]),
        (GOOD.replace('"info"', '"fatal"'), ["'one'", "severity", "info, warning or critical", "'fatal'"]),
        (GOOD + "share = 1.5", ["'one'", "share", "from 0", "1.5"]),
        (GOOD + "share = nan", ["'one'", "share", "nan"]),
        (GOOD + "share = true", ["'one'", "share", "True"]),
        (GOOD + "hold = 0", ["'one'", "hold", "at least 1", "0"]),
        (GOOD + "hold = 2.0", ["'one'", "hold", "at least 1", "2.0"]),
        (GOOD + "keep = true", ["'one'", "keep", "True"]),
        (GOOD + 'scope = "heads"', ["'one'", "scope", "head, layer or model", "'heads'"]),
        (GOOD + "summary = 1", ["'one'", "summary", "text"]),
        (GOOD + "unless = false", ["'one'", "unless", "a condition"]),
        (GOOD.replace("> 5", ">> 5"), ["'one'", "when", "column 12", "'>'"]),
        (GOOD + 'at_once = "lr <"', ["'one'", "at_once", "column 5", "the end"]),
    ],
)
def test_load_errors(tmp_path: Path, text: str, pieces: list[str]) -> None:
    """One line with the file, the rule, the key, what was expected and what was found."""
    path = tmp_path / "rules.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        load_rules(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for piece in pieces:
        assert piece in message


def test_unreadable_files(tmp_path: Path) -> None:
    """No such file, a directory, not text: one line that names it."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(UsageError, match=r"\A[^\n]+\Z") as raised:
            load_rules(path)
        assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        (
            Rule("r", "info", "entropy_rato < 1"),
            ["'r'", "when", "column 1", "'entropy_rato'", "first): entropy_ratio,"],
        ),
        (Rule("r", "info", "lr > 1", unless="loss > 1 or x > 1"), ["'r'", "unless", "column 13", "'x'", "uncovered"]),
        (Rule("r", "info", "1 < 2"), ["'r'", "when", "something measured"]),
        (Rule("r", "info", "loss > 1", scope="head"), ["'r'", "scope", "expected model", "head"]),
        (Rule("r", "info", "uncovered_layers > 1", scope="layer"), ["'r'", "scope", "expected model", "layer"]),
        (Rule("r", "info", "loss > 1", summary="{los}"), ["'r'", "summary", "'los'", "place", "loss"]),
        (Rule("r", "info", "loss > 1", advice="{loss:d}"), ["'r'", "advice", "'loss'", "'d'"]),
    ],
)
def test_engine_errors(rule: Rule, pieces: list[str]) -> None:
    """What needs the names that exist: one line with rule, key and, in a condition, the column."""
    with pytest.raises(UsageError) as raised:
        Engine([rule], METRICS)
    message = str(raised.value)
    assert "\n" not in message
    for piece in pieces:
        assert piece in message


def test_engine_refuses_one_name_twice() -> None:
    """A rule's name is half of an alert's identity."""
    rule = Rule("r", "info", "loss > 1")
    with pytest.raises(UsageError, match=r"'r'.*2 times"):
        Engine([rule, rule], METRICS)
