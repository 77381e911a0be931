"""Programs of the outside world that tests run for real."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import made_runs, monitoring

from attnwatch.monitor.run import Run
from attnwatch.monitor.store import open_run

if TYPE_CHECKING:
    from tests.recipes import Decoder

# Tiny tensors on shared cores: a second thread mostly waits. Set before torch is loaded, and for subprocesses too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that were started in the background inherit an ignored Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """torch draws its first seed by chance, and other tests of a process draw too: every test begins with the same."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A monitor that a test dropped ends when it is collected. While it waits for a sampled step, all of the process
    runs uncompiled: that must not be left to chance, and what is still left then is a leak."""
    yield
    compiled = sys.modules.get("attnwatch.hooks.compiled")
    if compiled is not None and compiled.EagerStep._running:
        gc.collect()
        left = list(compiled.EagerStep._running)
        for step in left:
            step.stop()  # said of this test only
        assert not left, f"{item.nodeid} left a sampled step open"


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What the tests of one file left to the garbage collector is not found alive by those of another."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of a program. Where it is missing the test is skipped and says so, or fails when CI is set."""
    return monitoring.program


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """Asks until the answer is true and returns it; fails when it never is: `wait_for(ask, what, seconds=120)`."""
    return monitoring.wait_for


@pytest.fixture
def model() -> Decoder:
    """A small one that attnwatch can see through."""
    import torch
    from tests.recipes import Attention, Decoder, fused

    torch.manual_seed(0)
    return Decoder(partial(Attention, fused))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where to record; nothing is there yet."""
    return tmp_path / "run"


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


@pytest.fixture(scope="session")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(made_runs.collapse(tmp_path_factory.mktemp("runs") / "plain"))


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(made_runs.collapse(tmp_path_factory.mktemp("runs") / "qknorm", collapses=False))
