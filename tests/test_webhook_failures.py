"""Receivers that fail in every way we could think of: training does not wait, what is lost is named, nothing leaks."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.receiver import Receiver
from tests.recipes import BATCH, LENGTH, TOKENS, Attention, Decoder, fused
from tests.webhooks import FIRED, RESOLVED, SECRET, Hook, WaitFor, complaint, hooks, update

import attnwatch
from attnwatch.monitor.outputs.courier import Courier, Undelivered
from attnwatch.monitor.outputs.notices import alertmanager
from attnwatch.monitor.outputs.webhook import WebhookOutput


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    with hooks(monkeypatch) as make:
        yield make


# --- one request ----------------------------------------------------------------------------------------------------


def test_what_may_pass_is_tried_again(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver(500, "close", 429, 408) as receiver:
        output = hook(receiver)
        output.write(update(FIRED))
        output.close()
        assert len({each.body for each in receiver.posted}) == 1
        assert len(receiver.posted) == 5


def test_tries_have_an_end_and_then_it_is_named(hook: Hook, wait_for: WaitFor) -> None:
    """The receiver that is back gets the next alert: the output goes on."""
    with Receiver(500, 503, 500) as receiver:
        output = hook(receiver, tries=3)
        output.write(update(FIRED))
        assert complaint(output, wait_for) == "an alert could not be delivered: the receiver answered 500"
        output.write(update(RESOLVED))
        assert [body["status"] for body in receiver.bodies(4, wait_for)] == ["firing"] * 3 + ["resolved"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(hook: Hook, wait_for: WaitFor, status: int) -> None:
    with Receiver() as other, Receiver((status, {"Location": f"http://{other.host}/inside"})) as receiver:
        output = hook(receiver)
        output.write(update(FIRED))
        assert complaint(output, wait_for) == f"an alert could not be delivered: the receiver answered {status}"
        assert (len(receiver.posted), other.posted) == (1, [])


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_will_not_pass_is_not_tried_again(hook: Hook, wait_for: WaitFor, status: int) -> None:
    with Receiver(status) as receiver:
        output = hook(receiver)
        output.write(update(FIRED))
        assert str(status) in complaint(output, wait_for)
        assert len(receiver.posted) == 1


def test_a_receiver_that_hangs_up_or_is_not_there_is_named(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver("close", "close") as receiver:
        output = hook(receiver, tries=2)
        output.write(update(FIRED))
        assert complaint(output, wait_for) == "an alert could not be delivered: RemoteDisconnected"
    output.write(update(FIRED))
    assert complaint(output, wait_for) == "an alert could not be delivered: ConnectionRefusedError"


def test_a_receiver_that_hangs_holds_up_nobody(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver("hang") as receiver:
        output = hook(receiver, tries=1, timeout=30, patience=0)
        begun = time.perf_counter()
        output.write(update(FIRED))
        assert time.perf_counter() - begun < 30, "the training thread waited for the network"
        wait_for(lambda: receiver.posted, "the request")
        assert output.write(update()) is None  # it is still under way
    with Receiver("hang") as receiver:
        output = hook(receiver, tries=1, timeout=0.2)
        output.write(update(FIRED))
        assert complaint(output, wait_for) == "an alert could not be delivered: TimeoutError"


@pytest.mark.parametrize("answer", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_receiver_that_never_comes_to_an_end_is_left(answer: bytes, hook: Hook, wait_for: WaitFor) -> None:
    """Each part of its answer is in time."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            client, _ = server.accept()
            with client, suppress(OSError):
                while not over.wait(0.02):
                    client.sendall(answer)

        thread = threading.Thread(target=drip)
        thread.start()
        output = hook(f"127.0.0.1:{server.getsockname()[1]}", tries=1, timeout=0.5)
        output.write(update(FIRED))
        assert re.fullmatch(r"an alert could not be delivered: \w+", complaint(output, wait_for))
        over.set()
        thread.join()


def test_close_waits_for_a_bounded_time_and_says_what_is_lost(hook: Hook) -> None:
    with Receiver("hang") as receiver:
        output = hook(receiver, timeout=50, patience=0.2)
        output.write(update(FIRED))
        begun = time.perf_counter()
        with pytest.raises(Undelivered, match=r"^the last updates were not delivered within 0\.2 s$"):
            output.close()
        assert time.perf_counter() - begun < 50


def test_close_lets_the_last_alert_out(hook: Hook) -> None:
    with Receiver(503) as receiver:
        output = hook(receiver)
        output.write(update(FIRED))
        output.close()
        output.close()
        assert len(receiver.posted) == 2


def test_a_receiver_may_ask_for_time(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver((429, {"Retry-After": "1"})) as receiver:
        output = hook(receiver)
        begun = time.monotonic()
        output.write(update(FIRED))
        receiver.bodies(2, wait_for)
        assert time.monotonic() - begun >= 1


def test_a_full_queue_drops_counts_and_says_so() -> None:
    """Two may wait while one is on its way: of six, three are dropped."""
    under_way, go_on = threading.Event(), threading.Event()
    delivered: list[int] = []

    def deliver(thing: int) -> None:
        under_way.set()
        assert go_on.wait(30)
        delivered.append(thing)

    courier = Courier(deliver, "test", room=2)
    courier.take(0)
    assert under_way.wait(30)
    for thing in range(1, 6):
        courier.take(thing)
    assert courier.complaint() == "more than 2 updates were waiting: later ones are dropped"
    assert courier.complaint() is None
    go_on.set()
    with pytest.raises(Undelivered, match=r"^3 updates were dropped$"):
        courier.close(30)
    assert delivered == [0, 1, 2]


def test_proxies_of_the_environment_are_not_used(
    hook: Hook, wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Receiver() as proxy, Receiver() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{proxy.host}")
        hook(receiver).write(update(FIRED))
        receiver.bodies(1, wait_for)
        assert proxy.posted == []


def test_https_needs_a_certificate_that_holds(
    hook: Hook, wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server with a certificate of its own making is refused, and gets no byte of the alert."""
    subject = ["-subj", f"/CN={SECRET}", "-days", "2", "-nodes"]
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", *subject, *files], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with Receiver() as receiver:
        server = receiver._server
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setattr(server, "handle_error", lambda *_: None)
        monkeypatch.setenv("SAFE", f"https://{receiver.host}/{SECRET}")
        output = WebhookOutput("SAFE", tries=1)
        output.write(update(FIRED))
        assert complaint(output, wait_for) == "an alert could not be delivered: SSLCertVerificationError"
        assert receiver.posted == []
        output.close()


def test_a_name_and_password_of_the_address_become_a_header(wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch) -> None:
    """base64 of "me:p@ss"."""
    with Receiver() as receiver:
        monkeypatch.setenv("HOOK", f"http://me:p%40ss@{receiver.host}")
        output = WebhookOutput("HOOK")
        output.write(update(FIRED))
        output.close()
        assert (receiver.posted[0].path, receiver.posted[0].headers["Authorization"]) == ("/", "Basic bWU6cEBzcw==")


# --- a whole run -----------------------------------------------------------------------------------------------------


def train(run: Path, output: WebhookOutput, steps: int) -> attnwatch.Monitor:
    """A watched run whose first step fires an alert."""
    torch.manual_seed(0)
    model = Decoder(partial(Attention, fused))
    always = [attnwatch.Rule("always", "critical", "loss > 0", summary="as made up")]
    with attnwatch.watch(model, run=run, every=1, rules=always, outputs=[output]) as monitor:
        for _ in range(steps):
            tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            monitor.step(loss=loss)
    return monitor


def test_a_run_names_a_bad_receiver_and_never_its_address(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its problems, its events, its log and its report; training goes on."""
    caplog.set_level(logging.DEBUG)
    with Receiver(404) as receiver:
        monitor = train(tmp_path / "run", hook(receiver), steps=3)
        assert len(receiver.posted) == 1
    text = "an alert could not be delivered: the receiver answered 404"
    assert [problem.where for problem in monitor.problems] == ["WebhookOutput"]
    stored = attnwatch.open_run(tmp_path / "run")
    assert stored.ended
    assert stored.steps.tolist() == [0, 1, 2]
    assert [problem.where for problem in stored.problems] == ["WebhookOutput"]
    assert text in caplog.text
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    shown = "".join(capfd.readouterr()) + caplog.text + repr(monitor.problems) + str(monitor)
    assert text.encode() in written
    assert SECRET.encode() not in written
    assert SECRET not in shown


def test_the_last_alert_that_does_not_get_out_is_named_too(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the report is written, but in the run's events and in the log."""
    with Receiver("hang") as receiver:
        train(tmp_path / "run", hook(receiver, patience=0.2), steps=1)
    text = "the last updates were not delivered within 0.2 s"
    assert [problem.text for problem in attnwatch.open_run(tmp_path / "run").problems] == [f"Undelivered: {text}"]
    assert text in caplog.text


def test_many_alerts_are_written_down_by_another_thread(hook: Hook) -> None:
    """All heads of a large model at once: training only hands them over."""
    alerts = [replace(FIRED, place=f"h.{layer}/{head}") for layer in range(100) for head in range(64)]
    begun = time.thread_time()
    alertmanager(alerts, "gpt", {}, 0.0)
    written = time.thread_time() - begun
    with Receiver() as receiver:
        output = hook(receiver)
        begun = time.thread_time()
        output.write(update(*alerts))
        taken = time.thread_time() - begun
        output.close()
        (posted,) = receiver.posted
    assert [alert["labels"]["place"] for alert in posted.json["alerts"]] == [alert.place for alert in alerts]
    assert taken < written / 2
