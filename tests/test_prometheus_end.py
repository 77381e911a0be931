"""How who scrapes learns that a run has ended: the last scrape, by each server that is there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing as closed_after
from http.client import HTTPConnection
from socketserver import ThreadingTCPServer
from threading import Thread, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
from tests.made_updates import fetch, full_update, parsed, server

from attnwatch.monitor.outputs import scrapes
from attnwatch.monitor.outputs.exposition import Exposition
from attnwatch.monitor.outputs.prometheus import Prometheus, PrometheusOutput

FOREVER = 600.0


def closing(output: PrometheusOutput) -> Thread:
    thread = Thread(target=output.close, name="closing", daemon=True)
    thread.start()
    return thread


def is_free(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_final_state_stays_until_it_was_scraped(wait_for: Callable[..., Any]) -> None:
    output = server(Prometheus(port=0, linger=FOREVER))
    output.write(full_update(("h.0",)))
    assert parsed(fetch(output.port))["attnwatch_finished"] == {(): 0}
    thread = closing(output)
    wait_for(lambda: output._exposition.finished, "the end")
    found = parsed(fetch(output.port))
    assert found["attnwatch_finished"] == {(): 1}
    assert found["attnwatch_step"] == {(): 100}
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert is_free(output.port)


def test_who_has_just_been_answered_counts_as_one_who_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the server's thread is: a run that closes at that moment is there for one more scrape."""

    def slow() -> float:
        if current_thread().name != "closing":
            time.sleep(0.2)
        return time.monotonic()

    monkeypatch.setattr(scrapes, "time", SimpleNamespace(monotonic=slow))
    output = server(Prometheus(port=0, linger=FOREVER))
    assert parsed(fetch(output.port))["attnwatch_finished"] == {(): 0}
    thread = closing(output)
    thread.join(timeout=0.5)
    assert thread.is_alive()
    assert parsed(fetch(output.port))["attnwatch_finished"] == {(): 1}
    thread.join(timeout=60)
    assert not thread.is_alive()


def finished(port: int, source: str) -> bool:
    """What a scrape from that address of this machine finds."""
    with closed_after(HTTPConnection("127.0.0.1", port, timeout=30, source_address=(source, 0))) as client:
        client.request("GET", "/metrics")
        return parsed(client.getresponse().read().decode())["attnwatch_finished"] == {(): 1}


@pytest.mark.parametrize("sources", [("127.0.0.2", "127.0.0.3"), ("127.0.0.1", "127.0.0.1")], ids=["two hosts", "one"])
def test_each_of_a_pair_of_servers_is_told_of_the_end(sources: tuple[str, str], wait_for: Callable[..., Any]) -> None:
    """Prometheus is run twice where it must not be missed: on two hosts (all of 127.0.0.0/8 is this machine), or behind
    a proxy or a tunnel that makes them one address, which is told as often as it has asked."""
    output = server(Prometheus(port=0, linger=FOREVER))
    assert [finished(output.port, source) for source in sources] == [False, False]
    thread = closing(output)
    wait_for(lambda: output._exposition.finished, "the end")
    assert finished(output.port, sources[0])
    thread.join(timeout=0.5)
    assert thread.is_alive()
    assert finished(output.port, sources[1])
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_scrapes_of_long_ago_count_as_one(monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]) -> None:
    """Of 25, 14 and 10 seconds ago with 10 to linger: who was there 25 seconds ago does not come again."""
    now = [0.0]
    monkeypatch.setattr(scrapes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    output = server(Prometheus(port=0, linger=10))
    for at, source in ((0.0, "127.0.0.3"), (11.0, "127.0.0.2"), (15.0, "127.0.0.2")):
        now[0] = at
        assert not finished(output.port, source)
    now[0] = 25.0
    thread = closing(output)
    wait_for(lambda: output._exposition.finished, "the end")
    assert finished(output.port, "127.0.0.2")
    thread.join(timeout=8)  # less than the ten
    assert not thread.is_alive()


def test_who_asks_is_answered_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads, and in Python 3.12.1 at the end of the process, where runs are closed that nobody did."""
    output = server(Prometheus(port=0, linger=0))

    def none(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(ThreadingTCPServer, "process_request", none)
    for _ in range(2):
        assert parsed(fetch(output.port))["attnwatch_finished"] == {(): 0}
    output.close()


def test_an_answer_that_says_finished_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]
) -> None:
    """Also when the run ends while a scrape is answered: then the scraper is told with the next one, or with this."""
    output = server(Prometheus(port=0, linger=FOREVER))
    fetch(output.port)
    rendered, threads = Exposition.text, []

    def end_before(exposition: Exposition) -> Iterator[str]:
        if not threads:
            threads.append(closing(output))
            wait_for(lambda: output._exposition.finished, "the end")
        return rendered(exposition)

    monkeypatch.setattr(Exposition, "text", end_before)
    answers = [parsed(fetch(output.port))["attnwatch_finished"] == {(): 1}]
    if not answers[0]:
        answers.append(parsed(fetch(output.port))["attnwatch_finished"] == {(): 1})
    assert answers[-1]
    threads[0].join(timeout=60)
    assert not threads[0].is_alive()


def test_nobody_waits_for_a_scrape_that_nobody_makes() -> None:
    output = server(Prometheus(port=0, linger=FOREVER))
    thread = closing(output)
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_the_wait_is_bounded() -> None:
    output = server(Prometheus(port=0, linger=0.05))
    fetch(output.port)
    thread = closing(output)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert is_free(output.port)
