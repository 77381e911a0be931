"""Programs of the outside world that tests run for real."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from tests import made_runs

from attnwatch.monitor.run import Run
from attnwatch.monitor.store import open_run

# Tiny tensors on shared cores: a second thread mostly waits. Set before torch is loaded, and for subprocesses too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

Query = Callable[[str], dict[tuple[str, ...], float]]
"""PromQL text -> value of each series by the values of its labels, in the order of the labels' names."""


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing(f"needs {name} on the PATH")
    return path


def _wait_for(ask: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return answer


def _key(labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in sorted(labels) if name not in ("__name__", "job", "instance"))


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of a program. Where it is missing the test is skipped and says so, or fails when CI is set."""
    return _program


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """Asks until the answer is true and returns it; fails when it never is: `wait_for(ask, what, seconds=60)`."""
    return _wait_for


@pytest.fixture
def probes() -> Iterator[Callable[[Any], Any]]:
    """Makes probes that look inside compiled graphs, and closes them."""
    from attnwatch.hooks.probe import Probe

    made: list[Probe] = []

    def make(model: Any) -> Probe:
        made.append(Probe(model, rows=None, sequences=1000, graph=True))
        return made[-1]

    yield make
    for probe in made:
        probe.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[int], Query]]:
    """Starts a real Prometheus server that scrapes a local port every second; returns how to query it."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(target: int) -> Query:
        binary = _program("prometheus")
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        job = {"job_name": "training", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        log = (tmp_path / "prometheus.log").open("wb")
        with log:
            server = subprocess.Popen(
                [
                    binary,
                    f"--config.file={tmp_path / 'prometheus.yml'}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )
        servers.append(server)

        def is_ready() -> bool:
            assert server.poll() is None, (tmp_path / "prometheus.log").read_text()
            try:
                with urlopen(f"http://{address}/-/ready", timeout=5):
                    return True
            except URLError:
                return False

        def query(text: str) -> dict[tuple[str, ...], float]:
            with urlopen(f"http://{address}/api/v1/query?{urlencode({'query': text})}", timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
            return {_key(series["metric"]): float(series["value"][1]) for series in found}

        _wait_for(is_ready, "Prometheus to start")
        return query

    yield start
    for server in servers:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(made_runs.collapse(tmp_path_factory.mktemp("runs") / "plain"))


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(made_runs.collapse(tmp_path_factory.mktemp("runs") / "qknorm", collapses=False))
