"""The alerting rules that are shipped, by promtool: what fires while a run collapses, ends, crashes, restarts.

Series are in promtool's notation, one value a minute: `2+0x3` is four times 2, `_` no scrape, `stale` a lost target.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attnwatch.monitor.cli import main
from attnwatch.monitor.outputs.alerting import JOB, alerting_rule, prometheus_rules
from attnwatch.monitor.outputs.dashboard import dashboard
from attnwatch.monitor.rules import Rule, load_rules

TARGET = {"instance": "gpt", "job": "training"}
COLLAPSE = {"rule": "sparse_low_rank", "place": "model"}
STATE, SINCE = (f'{name}{{rule="sparse_low_rank",severity="critical",place="model"}}' for name in (
    "attnwatch_alert_state", "attnwatch_alert_pending_step"
))  # fmt: skip
RUNNING = {"attnwatch_finished": "0+0x300", "attnwatch_step": "0+10x300", "attnwatch_sampled_step": "0+10x300"}
"""Five hours of a run that is well."""

Test = Callable[..., None]


@pytest.fixture
def promtool(tmp_path: Path, program: Callable[[str], str]) -> Callable[[str, dict[str, Any]], None]:
    """Runs `promtool test rules` on rules and one test."""

    def run(rules: str, test: dict[str, Any]) -> None:
        (tmp_path / "rules.yml").write_text(rules, encoding="utf-8")
        (tmp_path / "test.yml").write_text(
            json.dumps({"rule_files": ["rules.yml"], "tests": [{"interval": "1m", **test}]})
        )
        command = [program("promtool"), "test", "rules", "test.yml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def firing(promtool: Callable[[str, dict[str, Any]], None]) -> Test:
    """Checks which alerts fire in which minutes, and that no other one of all that are shipped does."""
    rules = load_rules()
    severities = {rule.alert: rule.severity for rule in (*map(alerting_rule, rules), *JOB)}

    def check(series: Mapping[str, str], told: Mapping[int, Iterable[str]], **labels: Mapping[str, str]) -> None:
        def sample(alert: str) -> dict[str, Any]:
            known = {**TARGET, "alertname": alert, "alertstate": "firing", "severity": severities[alert]}
            return {"labels": with_labels("ALERTS", known | labels.get(alert, {})), "value": 1}

        asked = [
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": list(map(sample, alerts))}
            for minute, alerts in told.items()
        ]
        promtool(prometheus_rules(rules), {"input_series": written(series), "promql_expr_test": asked})

    return check


def written(series: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"series": with_labels(name, TARGET), "values": values} for name, values in series.items()]


def with_labels(name: str, labels: Mapping[str, str]) -> str:
    """A series with more labels than it has."""
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name[:-1]},{inside}}}" if name.endswith("}") else f"{name}{{{inside}}}"


def test_promtool_finds_nothing_wrong(tmp_path: Path, program: Callable[[str], str]) -> None:
    """Of the default rules, of none, of rules whose texts are full of signs, and whose names make one alert's name."""
    signs = "".join(map(chr, (*range(1, 0x110), 0x2028, 0x2029, 0xFEFF, 0xFFFE, 0xFFFF, 0x1F600)))
    hostile = tuple(
        Rule(
            name, "critical", "loss > 1", summary='"\\\n{{ }} $labels', advice='{{ x }} \\ " # : é\n- 😀 {place}' + text
        )
        for name in ("a.b-c_9", "a-b-c-9", "A_b.C-9", "gone", "problems", "_", "__")
        for text in (signs.replace("{", "").replace("}", ""),)
    )
    for name, rules in (("default", load_rules()), ("none", ()), ("hostile", hostile)):
        (tmp_path / name).write_text(prometheus_rules(rules), encoding="utf-8")
        command = [program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"SUCCESS: {len(rules) + len(JOB)} rules found" in done.stdout


def test_every_rule_has_an_alert_of_its_severity() -> None:
    """Under a name that Prometheus' users expect; what the rule counted is not counted again."""
    rules = [Rule("logit_growth_1e3", "warning", "logit_max > 1e3", hold=2), Rule("a.b-c", "info", "lr > 1")]
    alerts = [alerting_rule(rule) for rule in rules]
    assert [(a.alert, a.severity, a.wait) for a in alerts] == [
        ("AttnwatchLogitGrowth1e3", "warning", ""), ("AttnwatchABC", "info", "")
    ]  # fmt: skip
    assert "rule='a.b-c'" in alerts[1].expr


def test_a_healthy_run_is_quiet(firing: Test) -> None:
    firing(
        {**RUNNING, 'attnwatch_layers{state="uncovered"}': "0+0x300", "attnwatch_problems": "0+0x300"},
        {1: [], 60: [], 299: []},
    )


def test_a_collapse_fires_at_once_and_resolves_after_a_while(firing: Test) -> None:
    """Pending is no alert, because attnwatch has not yet counted enough samples."""
    series = {**RUNNING, STATE: "1 1 2 2 0+0x60", SINCE: "520+0x60"}
    alert = ["AttnwatchSparseLowRank"]
    firing(series, {1: [], 2: alert, 3: alert, 8: alert, 10: []}, AttnwatchSparseLowRank=COLLAPSE)


def test_lost_scrapes_and_a_restart_do_not_resolve_it(firing: Test) -> None:
    """The same port answers again three minutes later, and the alert is there again after two more."""
    series = {
        "attnwatch_finished": "0+0x10 stale _ _ 0+0x60", "attnwatch_step": "0+10x10 stale _ _ 100+10x60",
        STATE: "2 _ 2+0x8 stale _ _ _ 2+0x60", SINCE: "520+0x10 stale _ _ _ 520+0x60",
    }  # fmt: skip
    told = {minute: ["AttnwatchSparseLowRank"] for minute in range(30)}
    firing(series, told, AttnwatchSparseLowRank=COLLAPSE)


def test_a_loss_that_is_nan_fires_and_no_nan_does(firing: Test) -> None:
    """Whatever else is NaN: no expression compares it."""
    series = {
        **RUNNING, "attnwatch_loss_nonfinite": "0 0 1+0x60", "attnwatch_loss": "2 2 NaN+0x60",
        "attnwatch_entropy_ratio{layer=\"h.0\",stat=\"min\"}": "NaN+0x60", "attnwatch_grad_norm": "NaN+0x60",
    }  # fmt: skip
    firing(series, {1: [], 2: ["AttnwatchLossNotFinite"], 30: ["AttnwatchLossNotFinite"]})


def test_a_run_that_ended_is_not_missed(firing: Test) -> None:
    """A collapse that stood at its end stays for a while; then nothing is left of it here."""
    series = {
        "attnwatch_finished": "0+0x9 1 stale", "attnwatch_step": "0+10x10 stale", STATE: "2+0x10 stale",
        SINCE: "520+0x10 stale",
    }  # fmt: skip
    collapse = ["AttnwatchSparseLowRank"]
    firing(series, {9: collapse, 10: collapse, 14: collapse, 20: [], 60: []}, AttnwatchSparseLowRank=COLLAPSE)


def test_a_run_that_crashed_is_missed_for_an_hour(firing: Test) -> None:
    series = {"attnwatch_finished": "0+0x9 stale", "attnwatch_step": "0+10x9 stale"}
    firing(series, {9: [], 13: [], 16: ["AttnwatchGone"], 60: ["AttnwatchGone"], 75: []})


def test_training_that_stands_still_is_told(firing: Test) -> None:
    """Fifteen minutes without a step, for fifteen minutes; not that its samples stand still too."""
    series = {
        "attnwatch_finished": "0+0x99",
        "attnwatch_step": "0+10x10 100+0x90",
        "attnwatch_sampled_step": "0+10x10 100+0x90",
    }
    firing(series, {20: [], 35: [], 45: ["AttnwatchTrainingStalled"], 90: ["AttnwatchTrainingStalled"]})


def test_a_finished_run_that_is_still_there_does_not_stand_still(firing: Test) -> None:
    """A textfile that nobody removed."""
    firing({"attnwatch_finished": "0+0x10 1+0x90", "attnwatch_step": "0+10x10 100+0x90"}, {45: [], 90: []})


@pytest.mark.parametrize("sampled", ["0+10x5 50+0x200", None])
def test_steps_without_samples_are_told(firing: Test, sampled: str | None) -> None:
    """Also where there never was a sample."""
    series = {"attnwatch_finished": "0+0x200", "attnwatch_step": "0+10x200"}
    if sampled is not None:
        series["attnwatch_sampled_step"] = sampled
    firing(series, {25: [], 75: ["AttnwatchSamplingStalled"], 190: ["AttnwatchSamplingStalled"]})


def test_layers_that_are_not_seen_and_problems_are_told(firing: Test) -> None:
    series = {
        **RUNNING, "attnwatch_layers{state=\"uncovered\"}": "2+0x60", "attnwatch_layers{state=\"verified\"}": "9+0x60",
        "attnwatch_problems": "0 0 1+0x60",
    }  # fmt: skip
    uncovered = {"state": "uncovered"}
    told = {1: ["AttnwatchLayersUncovered"], 2: ["AttnwatchLayersUncovered", "AttnwatchProblems"]}
    firing(series, told, AttnwatchLayersUncovered=uncovered)


def test_the_advice_names_the_step_and_the_place(promtool: Callable[[str, dict[str, Any]], None]) -> None:
    """What only the evidence could fill in keeps its name; a brace stays a brace."""
    rule = Rule(
        "sparse_low_rank", "critical", "entropy < 1\n and logit_max > 2",
        advice="Before step {pending_step} of {place} {{go}}; {worst} has {entropy:.2f}.",
    )  # fmt: skip
    labels = {**TARGET, **COLLAPSE, "severity": "critical"}
    told = {
        "summary": "sparse_low_rank at model since step 1200000",
        "condition": "entropy < 1 and logit_max > 2",
        "advice": "Before step 1200000 of model {go}; worst has entropy.",
    }
    test = {
        "input_series": written({STATE: "2+0x9", SINCE: "1200000+0x9"}),
        "alert_rule_test": [
            {
                "eval_time": "3m", "alertname": "AttnwatchSparseLowRank",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": told}],
            }
        ],
    }  # fmt: skip
    promtool(prometheus_rules([rule]), test)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_alerts_of_the_default_rules_or_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\nname = "mine"\nseverity = "info"\nwhen = "loss > 1"\n')
    assert main(["rules", "--prometheus"]) == 0
    assert capsys.readouterr().out == prometheus_rules(load_rules())
    assert main(["rules", "--prometheus", str(file)]) == 0
    assert capsys.readouterr().out == prometheus_rules([Rule("mine", "info", "loss > 1")])
    assert main(["rules", "--grafana", "--out", str(tmp_path / "dashboard.json")]) == 0
    assert json.loads((tmp_path / "dashboard.json").read_text()) == dashboard()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prometheus", "nowhere.toml"], "nowhere.toml: expected a file of rules, found No such file or directory"),
        (["--prometheus", "--grafana"], "not allowed with argument"),
        (["--prometheus", "wrong.toml"], "wrong.toml: rule 'mine', when: column 1: no name 'entropyy'; there are"),
    ],
)
def test_a_wrong_use_of_the_command_is_one_line(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text('[[rule]]\nname = "mine"\nseverity = "info"\nwhen = "entropyy < 1"\n')
    try:
        code: int | str | None = main(["rules", *arguments])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert text in captured.err
    assert captured.err.count("\n") == 1
