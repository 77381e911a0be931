"""How a server finds a run: target files and textfiles."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest
from tests import monitoring
from tests.made_updates import EMPTY, METRICS, alert, fetch, full_update, parsed, server

from attnwatch.monitor.outputs import textfile
from attnwatch.monitor.outputs.alerting import prometheus_rules
from attnwatch.monitor.outputs.prometheus import Prometheus, PrometheusOutput, prometheus_outputs
from attnwatch.monitor.outputs.textfile import TextfileOutput

FOREVER = 600.0


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says which of two ranks this process is, as torchrun does."""

    def be(number: int) -> None:
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", "2")

    return be


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# --- the target file --------------------------------------------------------------------------------------------------


def test_a_target_file_says_where_the_run_is_until_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "gpt.json"
    output = server(Prometheus(port=0, file_sd=file, labels={"team": "vision"}))
    labels = {"instance": "gpt", "team": "vision"}
    assert json.loads(file.read_text()) == [{"targets": [f"127.0.0.1:{output.port}"], "labels": labels}]
    output.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_others_may_reach_is_announced_by_the_name_of_its_host(tmp_path: Path) -> None:
    output = server(Prometheus(port=0, host="0.0.0.0", file_sd=tmp_path / "gpt.json"))
    assert json.loads((tmp_path / "gpt.json").read_text())[0]["targets"] == [f"{socket.gethostname()}:{output.port}"]
    output.close()


def test_each_rank_has_a_target_file_of_its_own(tmp_path: Path, rank: Callable[[int], None]) -> None:
    outputs = []
    for number in (0, 1):
        rank(number)
        outputs.append(server(Prometheus(port=0, file_sd=tmp_path / "gpt.json")))
    found = {path.name: json.loads(path.read_text())[0]["labels"] for path in tmp_path.iterdir()}
    assert found == {
        "gpt-rank00000.json": {"instance": "gpt-rank00000", "rank": "0"},
        "gpt-rank00001.json": {"instance": "gpt-rank00001", "rank": "1"},
    }
    for output in outputs:
        output.close()
    assert list(tmp_path.iterdir()) == []


def test_the_target_file_of_a_run_that_took_over_is_left(tmp_path: Path) -> None:
    """A restart may overlap with the end of what it replaces. Of two runs that go on, the one that no server finds
    says so."""
    settings = Prometheus(port=0, file_sd=tmp_path / "gpt.json")
    before, after = server(settings), server(settings)
    update = full_update(("h.0",))
    assert after.write(update) is None
    assert before.write(replace(update, is_new=False)) is None
    assert before.write(update) == (
        f"{str(tmp_path / 'gpt.json')!r} is another run's target file by now, and servers find only that run: give "
        "each its own"
    )
    before.close()
    assert str(after.port) in (tmp_path / "gpt.json").read_text()
    after.close()


def test_a_target_file_that_cannot_be_written_is_named_and_the_port_serves(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "gpt.json"
    (output,), refused = prometheus_outputs(METRICS, Prometheus(port=0, file_sd=file, linger=0))
    assert refused == [
        f"expected a target file to write, found {str(file)!r} (No such file or directory); pass file_sd= a path in a "
        "directory that Prometheus reads"
    ]
    assert isinstance(output, PrometheusOutput)
    assert "attnwatch_info" in fetch(output.port)
    output.close()


KILLED = """
import sys
from attnwatch.monitor.outputs.prometheus import Prometheus, prometheus_outputs
kept, refused = prometheus_outputs((), Prometheus(port=0, file_sd=sys.argv[1]))
print(refused, flush=True)
sys.stdin.read()
"""


def test_a_real_prometheus_finds_two_ranks_and_tells_an_end_from_a_crash(
    tmp_path: Path, rank: Callable[[int], None], wait_for: Callable[..., Any]
) -> None:
    """One ends after its last scrape and is forgotten; the other is killed, and an alert says so."""
    targets = tmp_path / "targets"
    targets.mkdir()
    rank(1)
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, targets / "gpt.json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    rank(0)
    ended = server(Prometheus(port=0, file_sd=targets / "gpt.json", labels={"run": "gpt"}, linger=5))
    ended.write(full_update(("h.0",)))
    rules = prometheus_rules([]).replace("for: 5m", "for: 1s")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "[]\n"
    try:
        discovery = {"file_sd_configs": [{"files": [f"{targets}/*.json"]}]}
        with monitoring.prometheus(tmp_path / "prometheus", discovery, rules) as prometheus:
            wait_for(lambda: len(prometheus.series("attnwatch_info")) == 2, "both ranks")
            labels = {found["rank"]: (found["instance"], found.get("run")) for found, _ in prometheus.series("up")}
            assert labels == {"0": ("gpt-rank00000", "gpt"), "1": ("gpt-rank00001", None)}
            ended.close()
            killed.kill()
            killed.wait()
            assert [path.name for path in targets.iterdir()] == ["gpt-rank00001.json"]
            wait_for(lambda: prometheus.alerts().get("AttnwatchGone") == "firing", "the killed rank to be missed")
            alive = prometheus.series("ALERTS{alertname='AttnwatchGone'}")
            assert [found["rank"] for found, _ in alive] == ["1"]
            wait_for(lambda: prometheus.series("attnwatch_info") == [], "both to be forgotten")
            last = prometheus.series("last_over_time(attnwatch_finished[5m])")
            assert sorted((found["rank"], value) for found, value in last) == [("0", 1), ("1", 0)]
    finally:
        killed.kill()
        killed.communicate()
        ended.discard()


# --- the textfile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textfile, "EVERY", 0.01)


@pytest.mark.usefixtures("quick")
def test_a_textfile_follows_the_run(tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """There from the start, whole whenever it is read, gone at the end."""
    file = tmp_path / "gpt.prom"
    (output,), refused = prometheus_outputs(
        METRICS, Prometheus(port=None, textfile=file, labels={"run": "a"}, linger=0)
    )
    assert refused == []
    assert parsed(file.read_text())["attnwatch_finished"] == {("a",): 0}
    for step in (1, 2):
        output.write(replace(full_update(("h.0",)), step=step))
        wait_for(lambda: parsed(file.read_text()).get("attnwatch_step") == {("a",): step}, "the step")  # noqa: B023
        assert list(tmp_path.iterdir()) == [file]
    output.close()
    output.close()
    assert list(tmp_path.iterdir()) == []


def test_the_final_state_of_a_textfile_stays_for_a_while(tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """Long enough to be read, and with the newest update, which no thread had written yet."""
    file = tmp_path / "gpt.prom"
    output = TextfileOutput(METRICS, file, linger=4)
    output.write(full_update(("h.0",)))
    thread = Thread(target=output.close)
    thread.start()
    found = wait_for(lambda: (now := parsed(file.read_text()))["attnwatch_finished"] == {(): 1} and now, "the end")
    assert found["attnwatch_step"] == {(): 100}
    thread.join(timeout=60)
    assert not file.exists()


@pytest.mark.usefixtures("quick")
def test_a_textfile_that_cannot_be_written_is_tried_again(tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """A full disk is full for a while; the monitor names it and goes on."""
    place = tmp_path / "place"
    place.mkdir()
    output = TextfileOutput(METRICS, place / "gpt.prom")
    (place / "gpt.prom").unlink()
    place.rmdir()
    text = wait_for(lambda: output.write(EMPTY), "the failure")
    assert text == f"{str(place / 'gpt.prom')!r} could not be written (No such file or directory)"
    place.mkdir()

    def is_back() -> bool:
        output.write(full_update(("h.0",)))
        return (place / "gpt.prom").exists() and "attnwatch_step 100" in (place / "gpt.prom").read_text()

    wait_for(is_back, "the file to be back")
    output.discard()
    assert list(place.iterdir()) == []


def test_a_textfile_in_no_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "gpt.prom"
    outputs, refused = prometheus_outputs(METRICS, Prometheus(port=None, textfile=file))
    assert outputs == []
    assert refused == [
        f"expected a file to write metrics to, found {str(file)!r} (No such file or directory); pass textfile= a path "
        "in the directory that node_exporter's textfile collector reads"
    ]


@pytest.mark.usefixtures("quick")
def test_a_real_node_exporter_serves_the_textfiles_of_two_ranks(
    tmp_path: Path, rank: Callable[[int], None], wait_for: Callable[..., Any]
) -> None:
    """Side by side: their help is the same, and a label tells them apart."""
    directory = tmp_path / "textfiles"
    directory.mkdir()
    outputs = []
    for number in (0, 1):
        rank(number)
        settings = Prometheus(port=None, textfile=directory / "gpt.prom", per_head=bool(number), linger=0)
        (output,), _ = prometheus_outputs(METRICS, settings)
        output.write(replace(full_update(("h.0",)), alerts=(alert("collapse", "critical", "firing"),)))
        outputs.append(output)
    wait_for(lambda: all("attnwatch_step" in file.read_text() for file in directory.glob("*.prom")), "both files")
    with monitoring.node_exporter(tmp_path / "node_exporter", directory) as address:
        text = urlopen(f"http://{address}/metrics", timeout=30).read().decode()
    for output in outputs:
        output.close()
    found = parsed(text)
    assert found["node_textfile_scrape_error"] == {(): 0}
    assert found["attnwatch_step"] == {("0",): 100, ("1",): 100}
    assert found["attnwatch_alert_state"] == {("model", number, "collapse", "critical"): 2 for number in "01"}
    assert found["attnwatch_entropy"]["h.0", "1", "max"] == 1.0
    assert found["attnwatch_head_entropy"] == {("0", "h.0", "1"): 0, ("1", "h.0", "1"): 1}
