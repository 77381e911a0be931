"""What attaching costs the process that trains, and whether it survives: cycles of attach and detach.

    python benchmarks/attach.py [--cycles N] [--ways armed gdb]

The trainee allocates all the time, in its training thread and in a second one: a debugger that called into it at the
wrong point would hang it. A stop is how long the longest step took while somebody attached or detached, by the
trainee's own clock. Afterwards the same training runs alone, and its losses are compared. Linux.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

WAYS = {"armed": [], "gdb": ["--unsafe"]}
HUNG = 120  # s without a step


class Cycles(NamedTuple):
    """stops: (attach, detach) of every cycle in seconds. usual: the median step. steps: (time, loss) of each."""

    stops: list[tuple[float, float]]
    usual: float
    steps: list[tuple[float, str]]


def train(out: Path, steps: int, way: str) -> None:
    """Train until `steps` are done (0: until there is a file `stop`), a line each into the file `steps`: time, loss."""
    import torch

    from attnwatch.monitor.attach.armed import arm
    from attnwatch.monitor.demo import BATCH, CONTEXT, Decoder, one_thread

    one_thread()
    sys.setswitchinterval(1e-4)  # s; else each operator of torch, which hands the lock over, waits 5 ms to have it back
    if way == "armed":
        arm()
    torch.manual_seed(0)
    model = Decoder(qk_norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    threading.Thread(target=_allocate_for_ever, daemon=True).start()
    done = 0
    with (out / "steps").open("w") as file:
        while done < steps or not (steps or (out / "stop").exists()):
            loss = model(torch.randint(256, (BATCH, CONTEXT + 1)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            file.write(f"{time.perf_counter()} {loss.item().hex()}\n")
            file.flush()
            _allocate()


def _allocate() -> None:
    """Blocks of all sizes, so that malloc is at work in all its ways."""
    _ = [bytearray(2**size + n) for size in range(4, 18) for n in range(4)], [{} for _ in range(500)]


def _allocate_for_ever() -> None:
    while True:
        _allocate()


def read(out: Path) -> list[tuple[float, str]]:
    path = out / "steps"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(float(at), loss) for at, loss in map(str.split, lines)]


def trainee(out: Path, steps: int, way: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--train", str(out), "--steps", str(steps), "--ways", way]
    return subprocess.Popen(command)


def wait_for_steps(process: subprocess.Popen[bytes], out: Path, more: int) -> None:
    """Until so many more steps are done. Raises SystemExit when the trainee hangs or has ended."""
    goal, end = len(read(out)) + more, time.monotonic() + HUNG
    while len(read(out)) < goal:
        if time.monotonic() > end or process.poll() is not None:
            process.kill()
            raise SystemExit(f"the trainee made no step in {HUNG} s, or ended")
        time.sleep(0.05)


def longest_step(out: Path, command: list[str]) -> float:
    """Of those that were under way while the command ran."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "attnwatch", *command], check=True, stdout=subprocess.DEVNULL)
    ended = time.perf_counter()
    return max((b - a for (a, _), (b, _) in pairwise(read(out)) if b > begun and a < ended), default=0.0)


def measure(way: str, cycles: int, out: Path) -> Cycles:
    process = trainee(out, 0, way)
    try:
        wait_for_steps(process, out, 20)
        stops = [cycle(process, way, out, number) for number in range(cycles)]
        (out / "stop").touch()
        process.wait(timeout=HUNG)
    finally:
        process.kill()
    steps = read(out)
    return Cycles(stops, statistics.median(b - a for (a, _), (b, _) in pairwise(steps)), steps)


def cycle(process: subprocess.Popen[bytes], way: str, out: Path, number: int) -> tuple[float, float]:
    """Attach, a few watched steps, detach, a few alone: the longest steps at both."""
    pid, run = str(process.pid), str(out / f"run-{number}")
    attached = longest_step(out, ["attach", pid, "--run", run, "--every", "2", *WAYS[way]])
    wait_for_steps(process, out, 5)
    detached = longest_step(out, ["detach", pid])
    wait_for_steps(process, out, 5)
    print(f"{way}: cycle {number + 1}, {attached:.2f} s, {detached:.2f} s", file=sys.stderr)
    return attached, detached


def is_as_alone(steps: list[tuple[float, str]], out: Path) -> bool:
    """Whether the training that nobody attached to has the same losses, bit for bit."""
    trainee(out, len(steps), "alone").wait()
    return [loss for _, loss in steps] == [loss for _, loss in read(out)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.steps, options.ways[0])
        return
    print("| way | cycles | usual step, s | at attach: median, most | at detach: median, most | losses as alone |")
    print("|---|---|---|---|---|---|")
    for way in options.ways:
        with tempfile.TemporaryDirectory() as attached, tempfile.TemporaryDirectory() as alone:
            found = measure(way, options.cycles, Path(attached))
            same = is_as_alone(found.steps, Path(alone))
        columns = [f"{statistics.median(x):.2f}, {max(x):.2f}" for x in zip(*found.stops, strict=True)]
        verdict = f"{'yes' if same else 'NO'}, {len(found.steps)} steps"
        print(
            f"| {way} | {len(found.stops)} | {found.usual:.3f} | {columns[0]} | {columns[1]} | {verdict} |", flush=True
        )


if __name__ == "__main__":
    main()
