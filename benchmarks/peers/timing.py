"""Steps of a watched model and of its unwatched twin, in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.peers.model import TOKENS, Decoder
from benchmarks.peers.watchers import OTHERS, SAME_WORK, Watcher


class Cost(NamedTuple):
    """ratio: of CPU times, watched over alone. parted: the first step whose loss is not that of the unwatched model."""

    ratio: float
    parted: int | None


@contextmanager
def training(kind: type[Watcher], length: int, batch: int) -> Iterator[Callable[[int], tuple[float, float]]]:
    """A step of training, given its number: its CPU seconds and its loss. Random numbers are as if it trained alone."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as place:
        watcher = kind(model, optimizer, Path(place))
        state = torch.get_rng_state()

        def step(number: int) -> tuple[float, float]:
            nonlocal state
            torch.set_rng_state(state)
            tokens = torch.randint(0, TOKENS, (batch, length + 1))
            start = time.process_time()
            watcher.before(number)
            loss = model(tokens)
            loss.backward()
            watcher.after_backward(number, loss.detach())
            watcher.optimizer.step()
            watcher.after_step(number, loss.detach())  # some read gradients
            optimizer.zero_grad()
            taken = time.process_time() - start
            state = torch.get_rng_state()
            return taken, loss.item()

        yield step
        watcher.close()


def measure(kind: type[Watcher], length: int, steps: int, batch: int = 4) -> Cost:
    """Pairs of steps; the first pair, which sets things up, is not counted."""
    pairs, parted = [], None
    with training(Watcher, length, batch) as alone, training(kind, length, batch) as watched:
        for number in range(steps + 1):
            order = (alone, watched) if number % 2 else (watched, alone)
            found = {step: step(number) for step in order}
            (cost, loss), (base, true) = found[watched], found[alone]
            pairs.append((cost, base))
            if parted is None and loss != true:
                parted = number
    return Cost(sum(cost for cost, _ in pairs[1:]) / sum(base for _, base in pairs[1:]), parted)


def apart(name: str, length: int, steps: int, packages: str) -> Cost:
    """`measure` in a process of its own, which also looks for modules in a directory. RuntimeError: why it failed."""
    command = [sys.executable, "-m", "benchmarks.peers", "--child", name, str(length), str(steps), packages]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError((run.stderr.strip() or f"it ended with {run.returncode}").splitlines()[-1])
    return Cost(*json.loads(run.stdout.splitlines()[-1]))


def install(packages: tuple[str, ...], place: str) -> None:
    if packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, *packages]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"not installed: {run.stderr.strip().splitlines()[-1]}")


def costs(name: str, steps: dict[int, int]) -> list[Cost]:
    """Of one watcher, in so many steps by length. RuntimeError: why there are none."""
    with tempfile.TemporaryDirectory() as place:
        install((SAME_WORK | OTHERS)[name].packages, place)
        return [apart(name, length, count, place) for length, count in steps.items()]
