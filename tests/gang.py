"""Several processes that train together, started as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

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
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    ended = tuple(process.returncode for process in processes)
    assert ended == (codes or (0,) * ranks), "\n".join(said)
    return said
