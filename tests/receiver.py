"""A real HTTP server on loopback that keeps what is posted to it, and answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

Answer = int | tuple[int, dict[str, str]] | str
"""A status; a status with headers; "close" hangs up without a word, "hang" waits until the receiver is closed."""


class Posted(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """A server as a context manager. answers: one after the other, then 200 for ever. posted: requests so far."""

    def __init__(self, *answers: Answer) -> None:
        self.posted: list[Posted] = []
        self._answers = list(answers)
        self._over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def bodies(self, count: int, wait_for: Callable[..., Any]) -> list[Any]:
        """The JSON of the first `count` requests, when they are there."""
        wait_for(lambda: len(self.posted) >= count, f"{count} requests")
        return [each.json for each in self.posted[:count]]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = receiver._answers.pop(0) if receiver._answers else 200
                receiver.posted.append(Posted(self.command, self.path, dict(self.headers), body))
                if answer == "hang":
                    receiver._over.wait(60)
                if isinstance(answer, str):
                    self.close_connection = True
                    return
                status, headers = answer if isinstance(answer, tuple) else (answer, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            do_GET = do_POST  # noqa: N815 (the name http.server calls)

            def log_message(self, *_: Any) -> None:
                """A test has its own output."""

        return Handler
