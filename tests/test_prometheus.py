"""The port that is scraped, asked over HTTP as a scraper asks it, and by a real Prometheus server."""

from __future__ import annotations

import gzip
import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from tests import monitoring
from tests.made_updates import EMPTY, HOSTILE, METRICS, alert, fetch, full_update, parsed, sample, told

from attnwatch.monitor.outputs.prometheus import Prometheus, PrometheusOutput, prometheus_outputs, prometheus_settings
from attnwatch.monitor.sample import UsageError

NAN = math.nan
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
AT_ONCE = Prometheus(port=0, linger=0)


@pytest.fixture
def output() -> Iterator[PrometheusOutput]:
    output = PrometheusOutput(METRICS, AT_ONCE)
    yield output
    output.close()


def test_a_real_prometheus_sees_a_run_from_alert_to_end(tmp_path: Path, wait_for: Callable[..., Any]) -> None:
    """The queries a user would write, hostile names included; after `close` nothing stale is left."""
    output = PrometheusOutput(METRICS, AT_ONCE)
    output.write(full_update(HOSTILE))
    targets = {"static_configs": [{"targets": [f"127.0.0.1:{output.port}"]}]}
    with monitoring.prometheus(tmp_path / "prometheus", targets) as server:
        query, comes_to = server.query, server.comes_to
        comes_to('attnwatch_alerts_firing{severity="critical"} > 0', {("critical",): 1})
        comes_to("attnwatch_loss_nonfinite == 1", {(): 1})
        assert query("attnwatch_loss > 0") == {}  # the trap that attnwatch_loss_nonfinite is for
        comes_to('attnwatch_alert_state{rule="collapse"} == 2', {("model", "collapse", "critical"): 2})
        comes_to('attnwatch_layers{state="verified"}', {("verified",): len(HOSTILE)})
        # The heads of layer i have the entropies 2 i and 2 i + 1. Prometheus holds an empty label to be no label.
        entropy = {(layer, "mean") if layer else ("mean",): 2 * i + 0.5 for i, layer in enumerate(HOSTILE)}
        comes_to('attnwatch_entropy{stat="mean"}', entropy)

        output.write(replace(full_update(("h.0",)), alerts=(alert("collapse", "critical", "resolved"),)))
        comes_to('attnwatch_alert_state{rule="collapse"}', {("model", "collapse", "critical"): 0})
        comes_to('attnwatch_entropy{stat="max"}', {("h.0", "max"): 1.0})

        output.close()
        wait_for(lambda: query("up == 0"), "the endpoint to be gone")
        assert query('{__name__=~"attnwatch_.+"}') == {}


@pytest.mark.parametrize(
    ("asked", "coding"),
    [
        (["gzip"], "gzip"),
        (["GZIP;q=0.001"], "gzip"),
        (["br;q=1.0, gzip ; q=0.8, identity;q=0"], "gzip"),
        (["deflate", "gzip"], "gzip"),  # two lines are one list
        (["gzip;q=0"], None),
        (["gzip; q=0.000, deflate"], None),
        (["gzipped, not-gzip"], None),
        (["identity"], None),
        (["*;q=0"], None),
        ([";;,,;q="], None),
        ([], None),
    ],
)
def test_an_answer_is_compressed_for_who_takes_it(
    asked: list[str], coding: str | None, output: PrometheusOutput
) -> None:
    """RFC 9110: a coding with the quality 0 is refused. Plain text is right for whoever says nothing of gzip."""
    output.write(full_update(HOSTILE))
    with closing(HTTPConnection("127.0.0.1", output.port, timeout=30)) as client:
        client.putrequest("GET", "/metrics", skip_accept_encoding=True)
        for line in asked:
            client.putheader("Accept-Encoding", line)
        client.endheaders()
        answer = client.getresponse()
        assert answer.headers["Content-Encoding"] == coding
        body = answer.read()
    assert (gzip.decompress(body) if coding else body).decode() == fetch(output.port)


def test_a_look_at_the_headers_is_no_scrape(output: PrometheusOutput) -> None:
    """Health checks of proxies ask so; the final state waits for somebody who reads it."""
    with urlopen(Request(f"http://127.0.0.1:{output.port}/metrics", method="HEAD")) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert int(answer.headers["Content-Length"]) == len(fetch(output.port).encode())
        assert answer.read() == b""


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/metrics/x", "/metricsx"])
def test_only_metrics_answers(output: PrometheusOutput, path: str) -> None:
    with pytest.raises(HTTPError, match="404") as error:
        fetch(output.port, path)
    error.value.close()


@pytest.mark.parametrize("port", [-1, 65536, True, "9464", 9464.0])
def test_what_is_no_port_is_one_clear_line(port: Any) -> None:
    with pytest.raises(UsageError) as error:
        prometheus_settings(port)
    assert str(error.value) == (
        f"prometheus: expected a port from 0 to 65535, found {port!r}; pass prometheus=0 to let the system pick"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"port": None}, "expected a port, found none; without one there can be textfile= and registry=, no file_sd="),
        ({"port": None, "textfile": "x.prom", "file_sd": "x.json"}, "expected a port, found none; without one "),
        ({"host": ""}, "expected host to be an address of this machine, or 0.0.0.0 for all, found ''"),
        ({"host": 4}, "expected host to be an address of this machine, or 0.0.0.0 for all, found 4"),
        ({"per_head": 64}, "expected per_head to be True or False, found 64"),
        ({"max_heads": 0}, "expected max_heads to be a whole number of at least 1, found 0"),
        ({"file_sd": "targets"}, "expected file_sd to be a path that ends in .json, found 'targets'"),
        ({"textfile": Path("x.txt")}, "expected textfile to be a path that ends in .prom, found "),
        ({"labels": {"layer": "x"}}, "expected labels to be texts by label name, and other names than the series' own"),
        ({"labels": {"run": 1}}, "expected labels to be texts by label name"),
        ({"labels": {"__run": "x"}}, "expected labels to be texts by label name"),
        ({"labels": {"a-b": "x"}}, "expected labels to be texts by label name"),
        ({"labels": ["run"]}, "expected labels to be texts by label name"),
        ({"linger": -1}, "expected linger to be seconds from 0 to 600, found -1"),
        ({"linger": NAN}, "expected linger to be seconds from 0 to 600, found nan"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        Prometheus(**options)
    assert str(error.value).startswith(f"prometheus: {text}")
    assert "\n" not in str(error.value)


def test_settings_are_plain_data_once_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go into run.json, and a trainer may change its directory."""
    monkeypatch.chdir(tmp_path)
    settings = Prometheus(file_sd=Path("a.json"), textfile="b.prom", labels={"run": "x"})
    assert json.loads(json.dumps(asdict(settings))) == {
        "port": 9464, "host": "127.0.0.1", "per_head": False, "max_heads": 1024, "labels": {"run": "x"}, "linger": 15.0,
            "registry": False,
        "file_sd": str(tmp_path / "a.json"), "textfile": str(tmp_path / "b.prom"),
    }  # fmt: skip
    assert prometheus_settings(settings) is settings
    assert prometheus_settings(0) == Prometheus(port=0)
    assert prometheus_settings(None) is None


def test_a_port_that_cannot_be_had_is_named_and_nothing_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outputs, refused = prometheus_outputs(METRICS, Prometheus(port=port))
    assert outputs == []
    assert refused == [
        f"expected a free port, found 127.0.0.1:{port} (Address already in use); pass prometheus=0 to let the system "
        "pick; an earlier monitor of this process may hold it until its monitor.close()"
    ]


@pytest.mark.parametrize(
    "host", ["host.invalid", "192.0.2.1", "fe80::1", "[::1]", "a..b", "é..b", "a" * 300, "\x00", "\ud800"]
)
def test_an_address_of_another_machine_is_named(host: str) -> None:
    """192.0.2.0/24 is nobody's: RFC 5737."""
    outputs, refused = prometheus_outputs(METRICS, Prometheus(port=0, host=host))
    assert outputs == []
    assert len(refused) == 1
    assert refused[0].startswith(f"expected a free port, found {host}:0 (")
    assert refused[0].endswith("; pass host= an address of this machine")


def test_another_address_is_listened_to_when_asked_for() -> None:
    """All of this machine's: also the one that the default refuses."""
    output = PrometheusOutput(METRICS, replace(AT_ONCE, host="0.0.0.0"))
    with urlopen(f"http://127.0.0.2:{output.port}/metrics", timeout=30) as answer:
        assert b"attnwatch_info" in answer.read()
    output.close()


def test_only_this_machine_is_listened_to(output: PrometheusOutput) -> None:
    """Another address of this machine, even another loopback one, is refused."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", output.port), timeout=5)


def test_close_frees_the_port_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    output = PrometheusOutput(METRICS, replace(AT_ONCE, port=monitoring.free_port()))
    (thread,) = set(threading.enumerate()) - before
    fetch(output.port)
    output.close()
    output.close()
    assert (thread.name, thread.is_alive()) == ("attnwatch-prometheus", False)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", output.port), timeout=5)
    again = PrometheusOutput(METRICS, replace(AT_ONCE, port=output.port))
    fetch(again.port)
    again.close()


FORKED = """
import os, socket, sys
from attnwatch.monitor.outputs.prometheus import Prometheus, PrometheusOutput
output = PrometheusOutput((), Prometheus(port=0, linger=0))
waits, wakes = os.pipe()
worker = os.fork()
if worker == 0:
    os.close(wakes)
    os.read(waits, 1)
    os._exit(0)
output.close()
try:
    socket.create_connection(("127.0.0.1", output.port), timeout=5)
except ConnectionRefusedError:
    PrometheusOutput((), Prometheus(port=output.port, linger=0)).close()
    print("free")
os.close(wakes)
os.waitpid(worker, 0)
"""


def test_a_forked_worker_does_not_keep_the_port() -> None:
    """Data-loading workers inherit the socket and may outlive the run."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("free\n", "")


OUT_OF_FILES = """
import resource, socket, time
from contextlib import suppress
from attnwatch.monitor.outputs.prometheus import Prometheus, PrometheusOutput
output = PrometheusOutput((), Prometheus(port=0, linger=0))
client = socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = []
with suppress(OSError):
    while True:
        opened.append(open("/dev/null"))
client.connect(("127.0.0.1", output.port))
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
begun, used = time.monotonic(), time.process_time()
time.sleep(1)
print((time.process_time() - used) / (time.monotonic() - begun) < 0.2)
for file in opened:
    file.close()
print(client.recv(12))
output.close()
"""


def test_a_trainer_without_file_descriptors_is_not_slowed_down() -> None:
    """Who asks meanwhile waits, at no cost, and is answered as soon as there is one."""
    run = subprocess.run([sys.executable, "-c", OUT_OF_FILES], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("True\nb'HTTP/1.0 200'\n", "")


def test_idle_and_slow_clients_block_nobody(output: PrometheusOutput) -> None:
    """Neither the next scrape nor the close."""
    output.write(full_update(tuple(f"h.{i}" for i in range(2000))))  # more than the socket's buffers hold
    clients = [socket.create_connection(("127.0.0.1", output.port)) for _ in range(20)]
    for client in clients[:10]:
        client.sendall(REQUEST)  # and never reads
    assert "attnwatch_step 100.0\n" in fetch(output.port)
    output.close()
    for client in clients[10:]:
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # still connected: the close did not wait for it
            client.recv(1)
    for client in clients:
        client.close()


def test_clients_that_pile_up_are_let_go(output: PrometheusOutput, wait_for: Callable[..., Any]) -> None:
    """The oldest ones: threads and file descriptors of the process are needed for training."""
    before = threading.active_count()
    clients = [socket.create_connection(("127.0.0.1", output.port)) for _ in range(100)]
    assert "attnwatch_info" in fetch(output.port)
    clients[0].settimeout(60)
    assert clients[0].recv(1) == b"", "the oldest is told"
    wait_for(lambda: threading.active_count() <= before + 65, "the threads of those that were let go to end")
    clients[-1].setblocking(False)
    with pytest.raises(BlockingIOError):  # still connected
        clients[-1].recv(1)
    for client in clients:
        client.close()


def test_each_of_many_scrapes_sees_one_whole_update(output: PrometheusOutput) -> None:
    """While updates are written, step, loss and every layer of one answer belong together."""
    updates = [
        replace(told(EMPTY, sample(step, np.full((3, 2, 2), step))), scalars={"loss": float(step)}, samples=step)
        for step in range(1, 201)
    ]
    output.write(updates[0])
    done = threading.Event()
    seen: list[set[float]] = []

    def scrape_on() -> None:
        while not done.is_set():
            found = parsed(fetch(output.port))
            names = ("step", "sampled_step", "loss", "samples_total", "entropy", "qk_rank")
            seen.append({value for name in names for value in found[f"attnwatch_{name}"].values()})

    threads = [threading.Thread(target=scrape_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 40 and any(thread.is_alive() for thread in threads):
        for update in updates:
            output.write(update)
    done.set()
    for thread in threads:
        thread.join()
    assert len(seen) >= 40
    assert all(len(values) == 1 for values in seen)
    assert len(set.union(*seen)) > 1


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (b"GET /metrics HTTP/1.0", b"HTTP/1.0 200 "),
        (b"GET http://host:1/metrics?x=[ HTTP/1.1", b"HTTP/1.0 200 "),
        (b"GET /metrics HTTP/1.1\r\nAccept-Encoding: \xff\x00", b"HTTP/1.0 200 "),
        (b"GET http://[ HTTP/1.1", b"HTTP/1.0 404 "),
        (b"GET //[/metrics HTTP/1.1", b"HTTP/1.0 404 "),
        (b"POST /metrics HTTP/1.1", b"HTTP/1.0 501 "),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200, b"HTTP/1.0 431 "),
        (b"GET /metrics HTTP/2.0", b""),
        (b"GET /metrics", b""),
        (b"\x16\x03\x01\x02\xff", b""),  # TLS
    ],
)
def test_no_request_is_news(
    asked: bytes,
    answer: bytes,
    output: PrometheusOutput,
    caplog: pytest.LogCaptureFixture,
    wait_for: Callable[..., Any],
) -> None:
    """Whatever is asked is answered or refused, without a word in the trainer's log."""
    before = set(threading.enumerate())
    with socket.create_connection(("127.0.0.1", output.port)) as client:
        client.sendall(asked + b"\r\n\r\n")
        assert client.makefile("rb").readline().startswith(answer)
    wait_for(lambda: set(threading.enumerate()) <= before, "the server to be done with it")
    assert caplog.records == []
    assert "attnwatch_info" in fetch(output.port)


def test_a_client_that_hangs_up_is_no_news(
    output: PrometheusOutput,
    wait_for: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is logged, nor printed into the trainer's terminal."""
    output.write(full_update(tuple(f"h.{i}" for i in range(2000))))
    before = set(threading.enumerate())
    for _ in range(5):
        client = socket.create_connection(("127.0.0.1", output.port))
        client.sendall(REQUEST)
        client.recv(1)
        client.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the server to be done with them")
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
