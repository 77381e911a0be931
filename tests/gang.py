"""Several processes that train together, started as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from tests.monitoring import free_port
from torch.distributed import TCPStore

SECONDS = 240


def gang(script: str, ranks: int, *arguments: str, codes: tuple[int, ...] = ()) -> list[str]:
    """What each of the processes said. codes: what they are to end with; none says: all with 0."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    shared = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _ended([start(command, environment) for environment in own], codes)


def nodes(script: str, count: int, ranks: int, *arguments: str) -> list[str]:
    """What each of the nodes said: so many torchruns that know of each other, with so many ranks each."""
    shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    known = ["--nnodes", str(count), "--nproc-per-node", str(ranks), "--master-addr", "localhost"]
    command = [sys.executable, "-m", "torch.distributed.run", *known, "--master-port", str(free_port())]
    trained = [str(Path(__file__).parent / script), *arguments]
    return _ended([start([*command, "--node-rank", str(node), *trained], shared) for node in range(count)])


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _ended(processes: list[subprocess.Popen[str]], codes: tuple[int, ...] = ()) -> list[str]:
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    ended = tuple(process.returncode for process in processes)
    assert ended == (codes or (0,) * len(processes)), "\n".join(said)
    return said
