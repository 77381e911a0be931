"""What a Prometheus server scrapes: `/metrics` on a port of this process, and the file by which the server finds it."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Protocol

from attnwatch.monitor.outputs.exposition import SERIES, Exposition
from attnwatch.monitor.outputs.scrapes import PICK, listen
from attnwatch.monitor.outputs.textfile import TextfileOutput, replace_file
from attnwatch.monitor.sample import Metric, Update, UsageError

_TAKEN = {"layer", "stat", "head", *(label for series in SERIES for label in series.labels)}


@dataclass(frozen=True)
class Prometheus:
    """How a run can be scraped. Raises UsageError. Plain numbers, texts and absolute paths once it is made.

    port: 0 lets the system pick; None: no port. host: whom to listen to; the default is this machine alone, and there
        is neither encryption nor a password: put a proxy that has them before any other.
    per_head: single heads too, the first `max_heads` of them, layer by layer.
    file_sd: a target file to keep for Prometheus' `file_sd_configs` while the run goes on (`NAME.json`).
    textfile: a file to keep for node_exporter's textfile collector (`NAME.prom`), for hosts without a port.
        Of several ranks (WORLD_SIZE in the environment) each puts its own number into these two names.
    registry: put the series into prometheus_client's default registry too, which the trainer serves by itself.
    labels: more labels of this run, beside `rank` (RANK in the environment); in the target file and the textfile.
    linger: at most so many seconds `close` waits for a last scrape: the interval of your server.
    """

    port: int | None = 9464
    host: str = "127.0.0.1"
    per_head: bool = False
    max_heads: int = 1024
    file_sd: str | os.PathLike[str] | None = None
    textfile: str | os.PathLike[str] | None = None
    registry: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    linger: float = 15.0

    def __post_init__(self) -> None:
        if self.port is not None and (type(self.port) is not int or not 0 <= self.port <= 65535):
            raise UsageError(f"prometheus: expected a port from 0 to 65535, found {self.port!r}; {PICK}")
        if self.port is None and ((self.textfile is None and not self.registry) or self.file_sd is not None):
            raise UsageError(
                "prometheus: expected a port, found none; without one there can be textfile= and registry=, no file_sd="
            )
        is_number = isinstance(self.linger, int | float) and not isinstance(self.linger, bool)
        for name, is_valid, expected in (
            ("host", isinstance(self.host, str) and self.host, "an address of this machine, or 0.0.0.0 for all"),
            ("per_head", isinstance(self.per_head, bool), "True or False"),
            ("max_heads", type(self.max_heads) is int and self.max_heads >= 1, "a whole number of at least 1"),
            ("registry", isinstance(self.registry, bool), "True or False"),
            ("file_sd", _is_path(self.file_sd, ".json"), "a path that ends in .json"),
            ("textfile", _is_path(self.textfile, ".prom"), "a path that ends in .prom"),
            ("labels", isinstance(self.labels, Mapping) and all(map(_is_label, self.labels.items())),
             "texts by label name, and other names than the series' own"),
            ("linger", is_number and 0 <= self.linger <= 600, "seconds from 0 to 600"),
        ):  # fmt: skip
            if not is_valid:
                raise UsageError(
                    f"prometheus: expected {name} to be {expected}, found {repr(getattr(self, name))[:60]}"
                )
        for name in ("file_sd", "textfile"):
            path = getattr(self, name)
            object.__setattr__(self, name, None if path is None else os.path.abspath(path))
        object.__setattr__(self, "labels", dict(self.labels))

    @property
    def heads(self) -> int | None:
        """How many heads are exported one by one; None: none."""
        return self.max_heads if self.per_head else None


class Exporter(Protocol):
    """An output that can also be given up before the run begins."""

    def write(self, update: Update) -> str | None: ...

    def close(self) -> None: ...

    def discard(self) -> None: ...


def prometheus_settings(given: object) -> Prometheus | None:
    """What `watch` takes: a port, `Prometheus(...)` or None. Raises UsageError."""
    return given if given is None or isinstance(given, Prometheus) else Prometheus(port=given)  # type: ignore[arg-type]


def prometheus_outputs(metrics: Sequence[Metric], settings: Prometheus | None) -> tuple[list[Exporter], list[str]]:
    """The outputs that could be had; and what could not, a line each: training goes on without it."""
    outputs: list[Exporter] = []
    refused: list[str] = []
    if settings is None:
        return outputs, refused
    rank = os.environ.get("RANK")
    labels = {**({} if rank is None else {"rank": rank}), **settings.labels}
    if settings.port is not None:
        with _noted(refused):
            server = PrometheusOutput(metrics, settings)
            outputs.append(server)
            if settings.file_sd is not None:
                server.announce(_of_rank(settings.file_sd), labels)
    if settings.textfile is not None:
        with _noted(refused):
            file = _of_rank(settings.textfile)
            outputs.append(TextfileOutput(metrics, file, settings.heads, labels, settings.linger))
    if settings.registry:
        from attnwatch.monitor.outputs.registry import RegistryOutput  # 50 ms that nobody else has to wait for

        with _noted(refused):
            outputs.append(RegistryOutput(metrics, settings.heads))
    return outputs, refused


class PrometheusOutput:
    """Serves `http://host:port/metrics` from a thread until `close`.

    The attribute `port` is the real one where 0 was asked for. Raises UsageError where the port cannot be had.
    """

    def __init__(self, metrics: Sequence[Metric], settings: Prometheus) -> None:
        self._exposition = Exposition(metrics, settings.heads)
        self._server = listen(settings.host, settings.port or 0, self._exposition)
        self._linger = settings.linger
        self._target: tuple[Path, bytes] | None = None
        self._closed = False
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="attnwatch-prometheus", daemon=True)
        self._thread.start()

    def announce(self, path: Path, labels: Mapping[str, str]) -> None:
        """Write the target file, which `close` removes. Raises UsageError."""
        host = str(self._server.server_address[0])
        host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        labels = {"instance": path.stem, **labels}  # the same after a restart on another port
        content = json.dumps([{"targets": [f"{host}:{self.port}"], "labels": labels}]).encode()
        try:
            replace_file(path, content)
        except OSError as error:
            raise UsageError(
                f"expected a target file to write, found {str(path)!r} ({error.strerror or error}); "
                "pass file_sd= a path in a directory that Prometheus reads"
            ) from None
        self._target = path, content

    def write(self, update: Update) -> str | None:
        """The next scrape sees this update. Tells, at samples, that another run has taken the target file."""
        self._exposition.write(update)
        if self._target is None or not update.is_new or not self._is_taken():
            return None
        file = str(self._target[0])
        return f"{file!r} is another run's target file by now, and servers find only that run: give each its own"

    def close(self) -> None:
        """Tells that the run is finished, waits until who scrapes it was told, and frees the port. Safe to call twice.

        Waits at most `linger` seconds: until each host was told as often as it has scraped within that time, for two
        servers may come from one address; once, if it has scraped within twice that time.
        """
        if self._closed:
            return
        self._exposition.finish()
        try:
            self._server.wait(self._linger)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close at once, as if there had been no run."""
        if self._closed:
            return
        self._closed = True
        if self._target is not None and not self._is_taken():
            with suppress(OSError):
                self._target[0].unlink()
        self._server.shutdown()
        # A forked data-loading worker holds a copy of this socket: closing ours alone leaves it listening.
        with suppress(OSError):  # macOS does not know how
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def _is_taken(self) -> bool:
        with suppress(OSError):
            return self._target is not None and self._target[0].read_bytes() != self._target[1]
        return False  # it is gone


@contextmanager
def _noted(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        refused.append(str(error))


def _of_rank(path: str | os.PathLike[str]) -> Path:
    """The path with the number of this rank in it, where there are several."""
    rank, ranks, path = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "1"), Path(path)
    return path.with_stem(f"{path.stem}-rank{int(rank):05d}") if rank.isdecimal() and ranks != "1" else path


def _is_path(given: object, ending: str) -> bool:
    return given is None or (isinstance(given, str | os.PathLike) and str(given).endswith(ending))


def _is_label(pair: tuple[object, object]) -> bool:
    name, value = pair
    is_name = isinstance(name, str) and re.fullmatch("(?!__)[A-Za-z_][A-Za-z0-9_]*", name) and name not in _TAKEN
    return bool(is_name) and isinstance(value, str)
