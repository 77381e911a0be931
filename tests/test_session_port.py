"""The port that Prometheus scrapes, as a watched run opens and closes it."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.recipes import Decoder, forward

import attnwatch
from attnwatch import open_run


def test_a_port_in_use_is_a_problem_and_training_goes_on(model: Decoder, run: Path) -> None:
    """A restarted job must not die of the scraper's port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with attnwatch.watch(model, run=run, prometheus=port, report=False) as monitor:
            forward(model)
            monitor.step(loss=1.5)
            assert monitor.metrics_port is None
    assert [(problem.where, problem.text) for problem in open_run(run).problems] == [
        (
            "prometheus",
            f"expected a free port, found 127.0.0.1:{port} (Address already in use); pass prometheus=0 to let the "
            "system pick; an earlier monitor of this process may hold it until its monitor.close()",
        )
    ]
    assert open_run(run).steps.tolist() == [0]


def test_the_port_answers_until_close(model: Decoder, run: Path) -> None:
    settings = attnwatch.Prometheus(port=0, linger=0)
    with attnwatch.watch(model, run=run, prometheus=settings, report=False) as monitor:
        forward(model)
        monitor.step(loss=1.5)
        port = monitor.metrics_port
        text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    assert "\nattnwatch_loss 1.5\n" in text
    assert 'attnwatch_entropy{layer="blocks.1.attention",stat="mean"}' in text
    assert port is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
