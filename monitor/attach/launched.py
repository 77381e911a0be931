"""The side of a script that `attnwatch run` has started: wait for torch, then for the first optimizer step.

Python itself runs the script, as `python script.py` does; this is called by startup/sitecustomize.py before it.
Nothing is loaded that the script has not loaded: it may still choose how torch is to start.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnwatch.monitor.attach.watcher import Watcher

STARTUP = Path(__file__).parent / "startup"
VARIABLE = "ATTNWATCH_RUN"

_watchers: list[Watcher] = []


def environment(wanted: dict[str, Any]) -> dict[str, str]:
    """That of this process, with what `begin` needs in the process that takes its place."""
    path = os.environ.get("PYTHONPATH")
    asked = json.dumps({"wanted": wanted, "path": path, "process": os.getpid()})
    paths = [str(STARTUP), *([path] if path else [])]
    return {**os.environ, VARIABLE: asked, "PYTHONPATH": os.pathsep.join(paths)}


def begin() -> None:
    """Leave the environment as it was, for the script and what it starts; load the sitecustomize that was hidden."""
    asked = json.loads(os.environ.pop(VARIABLE))
    if asked["path"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = asked["path"]
    sys.path[:] = [path for path in sys.path if Path(path) != STARTUP]
    if asked["process"] == os.getpid():
        sys.meta_path.insert(0, AfterImport("torch", partial(_safely, _watch, asked["wanted"], asked["process"])))
        atexit.register(_say_if_nothing, os.getpid())
    # Where there is none, the ImportError tells Python that, as ever, and has it forget ours.
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")


class AfterImport:
    """Calls back once, when a module has been loaded. Many only ask where it is, to know whether it is installed."""

    def __init__(self, name: str, call: Callable[[], None]):
        self._name, self._call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        asked = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in asked if found is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        load = loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            del loader.exec_module
            load(module)
            sys.meta_path.remove(self)
            self._call()

        loader.exec_module = load_and_call
        return spec


def _safely(work: Callable[..., None], *arguments: Any) -> None:
    """Nothing of ours raises into the script: a library that it shadows or lacks, say."""
    try:
        work(*arguments)
    except Exception as error:
        atexit.unregister(_say_if_nothing)
        say(f"nothing is watched: {type(error).__name__}: {' '.join(str(error).split())}")


def _watch(wanted: dict[str, Any], process: int) -> None:
    """torch is there: wait for a step. Not in a forked copy that is the first to load it."""
    if os.getpid() != process:
        return
    from attnwatch.monitor.attach.crossing import Crossing

    crossing = Crossing()

    def first_step(optimizer: Any) -> None:
        crossing.after = None
        _safely(begin_with, optimizer)

    def begin_with(optimizer: Any) -> None:
        from attnwatch.monitor.attach.wanted import Wanted
        from attnwatch.monitor.attach.watcher import Watcher

        watcher = Watcher.current = Watcher(Wanted(**wanted), say, crossing)
        _watchers.append(watcher)
        crossing.after = watcher.after
        watcher.after(optimizer)

    crossing.after = first_step
    crossing.open()


def _say_if_nothing(process: int) -> None:
    if os.getpid() != process:
        return
    if not _watchers:
        say("nothing was watched: no optimizer took a step")
    for watcher in _watchers:
        if not watcher.begun:
            say(f"nothing was watched: {watcher.reason}")


def say(line: str) -> None:
    """On the script's standard error, if it has one that works."""
    if sys.stderr is not None:
        with suppress(Exception):
            print(f"attnwatch: {line}", file=sys.stderr, flush=True)
