"""Answers scrapes: a small HTTP server that knows who was told of the end of the run."""

from __future__ import annotations

import logging
import re
import socket
import sys
import time
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from errno import EADDRINUSE, EADDRNOTAVAIL, EINVAL
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Condition
from typing import Any

from attnwatch.monitor.outputs.exposition import Exposition
from attnwatch.monitor.sample import UsageError

LOG = logging.getLogger("attnwatch")

PICK = "pass prometheus=0 to let the system pick"

_CLIENTS = 64


def listen(host: str, port: int, exposition: Exposition) -> Server:
    """Raises UsageError where the port cannot be had. port: 0 lets the system pick."""
    try:
        return Server(host, port, exposition)
    except (OSError, TypeError) as error:  # TypeError: a text that can be no host's name
        errno, reason, advice = getattr(error, "errno", None), getattr(error, "strerror", None) or error, PICK
        if errno == EADDRINUSE:
            advice += "; an earlier monitor of this process may hold it until its monitor.close()"
        if errno in (EADDRNOTAVAIL, EINVAL) or isinstance(error, socket.gaierror | TypeError):
            advice = "pass host= an address of this machine"
        raise UsageError(f"expected a free port, found {host}:{port} ({reason}); {advice}") from None


def _takes_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` names it, and not with the quality 0, which is a refusal (RFC 9110, 12.4.2)."""
    for coding in accepted.lower().split(","):
        name, *weights = (part.strip() for part in coding.split(";"))
        if name == "gzip":
            return not any(re.fullmatch(r"q=0(\.0*)?", weight) for weight in weights)
    return False


def _zipped(pieces: Iterable[bytes]) -> bytes:
    """Piece by piece: zlib lets go of the GIL, so that a trainer waits for one family of series, not for all."""
    zipper = zlib.compressobj(level=1, wbits=31)  # 31: gzip's format. Level 9 takes ten times as long.
    return b"".join([*map(zipper.compress, pieces), zipper.flush()])


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds; an idle or stuck client's thread ends

    def do_GET(self) -> None:
        if not re.fullmatch("(?:http://[^/?#]*)?/metrics", self.path.partition("?")[0]):
            self.send_error(404, explain="The metrics are at /metrics.")
            return
        exposition = copy(self.server.exposition)  # what the text says and whether it is the end belong together
        families = (family.encode() for family in exposition.text())
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        if _takes_gzip(",".join(self.headers.get_all("Accept-Encoding", []))):
            self.send_header("Content-Encoding", "gzip")
            body = _zipped(families)
        else:
            body = b"".join(families)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if not exposition.finished:
            self.server.note(self.client_address[0])  # before the answer: who reads it may close the run at once
        self.wfile.write(body)
        if exposition.finished:
            self.server.tell(self.client_address[0])

    do_HEAD = do_GET  # noqa: N815 (the library asks for this name)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class Server(ThreadingTCPServer):
    """A thread per client, so that a slow one holds up nobody.

    Of more than `_CLIENTS` at a time the oldest is let go: threads and file descriptors are the trainer's too.
    """

    # Not HTTPServer: that one looks up the host's name at start, which takes seconds where DNS is broken.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, exposition: Exposition) -> None:
        self.exposition = exposition
        self._clients: OrderedDict[Any, None] = OrderedDict()
        self._asked: deque[tuple[str, float]] = deque(maxlen=1024)  # which host, when by the monotonic clock
        self._told: Counter[str] = Counter()  # of the end
        self._news = Condition()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def note(self, host: str) -> None:
        """It was answered while the run went on."""
        self._asked.append((host, time.monotonic()))

    def tell(self, host: str) -> None:
        """It was answered that the run is finished."""
        with self._news:
            self._told[host] += 1
            self._news.notify_all()

    def wait(self, seconds: float) -> None:
        """Until each host was told of the end as often as it had asked in so many seconds, and once if it had asked in
        twice as many; at most so long. Of a pair of servers both are to see the end, also from behind one address."""
        now = time.monotonic()
        asked = [(host, now - at) for host, at in self._asked.copy()]
        due = Counter({host: 1 for host, age in asked if age < 2 * seconds})
        due |= Counter(host for host, age in asked if age < seconds)
        with self._news:
            self._news.wait_for(lambda: due <= self._told, seconds)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # no file descriptor is left: the library would ask again at once, and again
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self._clients[request] = None
        if len(self._clients) > _CLIENTS:
            oldest, _ = self._clients.popitem(last=False)
            with suppress(OSError):  # it has just gone
                oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads are to be had, at exit not even one in Python 3.12.1
            self.process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # OSError: the client hung up
            LOG.error("attnwatch: a scrape failed", exc_info=error)
