"""Real servers on loopback, as a cluster has them: Prometheus, Alertmanager, and a webhook that hears its notices."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest


class Prometheus(NamedTuple):
    """A server that scrapes and asks its rules once a second."""

    address: str

    def query(self, text: str) -> dict[tuple[str, ...], float]:
        """PromQL -> value of each series by the values of its labels, in the order of the labels' names."""
        return {
            tuple(labels[name] for name in sorted(labels) if name not in ("__name__", "job", "instance")): value
            for labels, value in self.series(text)
        }

    def series(self, text: str) -> list[tuple[dict[str, str], float]]:
        """PromQL -> labels and value of each series."""
        result = _data(f"http://{self.address}/api/v1/query?{urlencode({'query': text})}")["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def comes_to(self, text: str, expected: dict[tuple[str, ...], float]) -> None:
        """Waits for it: where a machine is so busy that a scrape takes longer than a second, there is a gap."""
        wait_for(lambda: self.query(text) == expected, f"{text} to be {expected}")

    def alerts(self) -> dict[str, str]:
        """Name of each alert that is pending or firing -> its state."""
        alerts = _data(f"http://{self.address}/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in alerts}


@contextmanager
def prometheus(
    place: Path, targets: Mapping[str, Any], rules: str = "", alertmanager: str = "127.0.0.1:9"
) -> Iterator[Prometheus]:
    """targets: the discovery part of a scrape configuration. rules: YAML. place: a directory of its own."""
    place.mkdir()
    (place / "rules.yml").write_text(rules, encoding="utf-8")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(place / "rules.yml")] if rules else [],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [{"job_name": "training", **targets}],
    }
    address = _free_address()
    command = [f"--storage.tsdb.path={place / 'data'}", f"--web.listen-address={address}"]
    with _running("prometheus", place, [_config(place, config), *command], f"{address}/-/ready"):
        yield Prometheus(address)


@contextmanager
def alertmanager(place: Path, webhook: str) -> Iterator[str]:
    """The address of a server that tells the webhook at once."""
    place.mkdir()
    route = {"receiver": "hook", "group_wait": "0s", "group_interval": "1s", "group_by": ["alertname"]}
    config = {"route": route, "receivers": [{"name": "hook", "webhook_configs": [{"url": webhook}]}]}
    address = _free_address()
    command = [f"--storage.path={place / 'data'}", f"--web.listen-address={address}", "--cluster.listen-address="]
    with _running("prometheus-alertmanager", place, [_config(place, config), *command], f"{address}/-/ready"):
        yield address


@contextmanager
def node_exporter(place: Path, directory: Path) -> Iterator[str]:
    """The address of a server that serves the textfiles of a directory, and nothing else."""
    place.mkdir()
    address = _free_address()
    command = ["--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={directory}"]
    with _running("prometheus-node-exporter", place, [*command, f"--web.listen-address={address}"], f"{address}/"):
        yield address


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and the alerts that were posted to it, oldest first."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", heard
        server.shutdown()
        thread.join()


def program(name: str) -> str:
    """Its path. Where it is missing the test is skipped and says so, or fails when CI is set."""
    path = shutil.which(name)
    if path is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing(f"needs {name} on the PATH")
    return path


def free_port() -> int:
    """For a server that is started later. Below those that the system picks: no other test is given it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for(ask: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    """The first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return answer


@contextmanager
def _running(name: str, place: Path, arguments: list[str], ready: str) -> Iterator[None]:
    with (place / "log").open("wb") as log:
        process = subprocess.Popen([program(name), *arguments], stdout=log, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (place / "log").read_text()
        try:
            with urlopen(f"http://{ready}", timeout=30):
                return True
        except (OSError, HTTPException):  # not there, or not ready
            return False

    try:
        wait_for(is_ready, f"{name} to start")
        yield
    finally:
        process.terminate()
        process.wait(timeout=120)


def _config(place: Path, config: Mapping[str, Any]) -> str:
    (place / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    return f"--config.file={place / 'config.yml'}"


def _free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def _data(url: str) -> Any:
    with urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]
