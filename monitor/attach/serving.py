"""What a process that trains answers to `attnwatch attach` and `attnwatch detach`; in a thread beside training."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attnwatch
from attnwatch.monitor.attach.wanted import Wanted
from attnwatch.monitor.sample import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from attnwatch.monitor.attach.watcher import Watcher

LOG = logging.getLogger("attnwatch")

GivenUp = Callable[[], bool]


def watching() -> Watcher | None:
    """What watches in this process, and `detach` can end. What a forked copy has of it is its parent's."""
    module = sys.modules.get("attnwatch.monitor.attach.watcher")
    watcher: Watcher | None = module.Watcher.current if module is not None else None
    return watcher if watcher is not None and watcher.process == os.getpid() else None


def answer(request: dict[str, Any], has_left: Callable[[], bool]) -> dict[str, Any]:
    """The reply to a request: what was asked for, or `error`, one line. Never raises."""
    end = time.monotonic() + float(request.get("patience", 60))

    def given_up() -> bool:
        return time.monotonic() > end or has_left()

    try:
        if request.get("version") != attnwatch.__version__:
            raise UsageError(
                f"expected attnwatch {attnwatch.__version__}, which the process has, found {request.get('version')}; "
                f"use its own: {sys.executable} -m attnwatch"
            )
        match request.get("do"):
            case "attach":
                return _attach(Wanted(**request["wanted"]), given_up)
            case "look":
                return _look(given_up)
            case "detach":
                return _detach(given_up)
        raise UsageError(f"expected attach, look or detach, found {request.get('do')!r}")
    except UsageError as error:
        return {"error": str(error)}
    except TimeoutError:
        return {
            "error": "expected the process to train, found no optimizer step; wait until it trains, give --timeout, or "
            "name the process that trains, not its launcher or a worker of it"
        }
    except Exception as error:
        return {"error": f"expected to be served, found {type(error).__name__} in the process: {error}"}


def _load() -> None:
    """What work at a crossing needs, so that training does not wait for it."""
    if "torch" not in sys.modules:
        raise UsageError("expected a process that trains with torch, found none loaded in it; wait until it trains")
    for name in ("torch._dynamo", "attnwatch.monitor.watching", "attnwatch.reports.html"):
        import_module(name)


def _facts(found: Sequence[str]) -> dict[str, Any]:
    import torch

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, attnwatch {attnwatch.__version__}"
    return {"versions": versions, "found": list(found)}


def _look(given_up: GivenUp) -> dict[str, Any]:
    """What could be watched; nothing is."""
    _load()
    from attnwatch.monitor.attach.crossing import Crossing
    from attnwatch.monitor.attach.finding import find
    from attnwatch.monitor.attach.watcher import numbered

    crossing = Crossing()
    try:
        crossing.open()
        return crossing.ask(lambda _: _facts(numbered(find().trained)), given_up)
    finally:
        crossing.close()


def _attach(wanted: Wanted, given_up: GivenUp) -> dict[str, Any]:
    _load()
    from attnwatch.monitor.attach.crossing import Crossing
    from attnwatch.monitor.attach.watcher import Watcher

    present = watching()
    if present is not None:
        runs = ", ".join(str(each.monitor.run) for each in present.watched if each.monitor is not None)
        where = runs or "no directory yet"
        raise UsageError(f"expected a process that is not watched, found it watched in {where}; detach first")
    told: list[str] = []
    watcher = Watcher(wanted, told.append, Crossing())

    def start(optimizer: Optimizer) -> dict[str, Any] | None:
        stopped = time.perf_counter()
        if not watcher.start(optimizer):
            return None
        watcher.crossing.after = watcher.after
        return {"stopped": time.perf_counter() - stopped}

    try:
        watcher.crossing.open()
        reply = watcher.crossing.ask(start, given_up)
    except BaseException:
        watcher.close()
        watcher.crossing.close()
        raise
    Watcher.current = watcher
    said, watcher.tell = list(told), lambda line: LOG.info("attnwatch: %s", line)
    waiting = [
        f"{type(each.model).__name__} from its optimizer's next step on"
        for each in watcher.watched
        if each.monitor is None
    ]
    return {**_facts(watcher.found), **reply, "told": [*said, *(f"watching {each}" for each in waiting)]}


def _detach(given_up: GivenUp) -> dict[str, Any]:
    watcher = watching()
    if watcher is None:
        raise UsageError("expected a process that attnwatch was attached to, found nothing watched in it")
    from attnwatch.monitor.attach.watcher import ended

    were = watcher.crossing.ask(lambda _: (watcher.close(),), given_up)[0]
    watcher.crossing.close()
    return {"told": [ended(each) for each in were] or [f"nothing was watched: {watcher.reason}"]}
