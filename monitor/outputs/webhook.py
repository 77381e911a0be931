"""Alerts posted to an address: as an Alertmanager posts them, or as a chat message.

The address is a secret: it comes from an environment variable, and no log, report, error or `repr` shows it or a part
of it. Nothing else is sent to, neither a redirect's target nor a proxy that the environment may name.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from math import inf
from threading import Timer
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import attnwatch
from attnwatch.monitor.alerts import SEVERITIES, Alert
from attnwatch.monitor.outputs.courier import Courier, Undelivered
from attnwatch.monitor.outputs.notices import alertmanager, discord, identity, news, slack
from attnwatch.monitor.sample import Update, UsageError

STYLES = ("alertmanager", "slack", "discord")
LONGEST_WAIT = 30.0
"""Seconds between two tries, whatever the receiver asks for."""


class Answer(NamedTuple):
    """Status, and the seconds that the receiver asks to wait."""

    status: int
    wait: float


class WebhookOutput:
    """Posts the alerts that fired or resolved, one request an update; an output for `watch(outputs=[...])`.

    env: name of the environment variable that holds the address, http or https. style: "alertmanager" (its webhook
    JSON, version 4), "slack" or "discord". min_severity: milder alerts are not posted. timeout: seconds for connecting
    and for every read; twice as many for the whole answer. tries: at most so many for one request; a status 408, 429 or
    5xx and a failing connection are tried again after `backoff` seconds, twice as long each time. patience: seconds
    that `close` waits.

    Requests leave from a thread of their own; what cannot be delivered is dropped and named as a problem.
    Raises UsageError.
    """

    quick = True  # a courier carries the requests

    def __init__(
        self,
        env: str = "ATTNWATCH_WEBHOOK",
        style: str = "alertmanager",
        min_severity: str = "warning",
        *,
        timeout: float = 10.0,
        tries: int = 5,
        backoff: float = 1.0,
        patience: float = 10.0,
    ) -> None:
        if style not in STYLES:
            raise UsageError(f"expected style to be one of {', '.join(STYLES)}, found {style!r}")
        if min_severity not in SEVERITIES:
            raise UsageError(f"expected min_severity to be one of {', '.join(SEVERITIES)}, found {min_severity!r}")
        if type(tries) is not int or tries < 1:
            raise UsageError(f"expected tries to be a whole number of at least 1, found {tries!r}")
        for name, value, least in (("timeout", timeout, 0.001), ("backoff", backoff, 0), ("patience", patience, 0)):
            if type(value) not in (int, float) or not least <= value < inf:
                raise UsageError(f"expected {name} to be seconds, at least {least:g}, found {value!r}")
        self._post = _sender(env, timeout)
        self._style, self._min_severity = style, min_severity
        self._tries, self._backoff, self._patience = tries, backoff, patience
        self._made = time.time()
        self._began: dict[tuple[str, str, int], float] = {}
        self._courier = Courier(self._deliver, "attnwatch-webhook")

    def write(self, update: Update) -> str | None:
        """Hands over what fired or resolved; tells what could not be delivered since the last time."""
        alerts, now = news(update, self._min_severity), time.time()
        if alerts:
            self._courier.take(partial(self._body, alerts, update.run.name, self._dated(alerts, now), now))
        return self._courier.complaint()

    def close(self) -> None:
        """Waits until the last alert is out, at most `patience` seconds. Raises Undelivered when it is not."""
        self._courier.close(self._patience)

    def _dated(self, alerts: list[Alert], now: float) -> dict[tuple[str, str, int], float]:
        """Unix seconds at which each began."""
        began = {}
        for alert in alerts:
            # One that fired in an earlier process began before this one did.
            at = self._began.pop(identity(alert), now if alert.state == "firing" else self._made)
            began[identity(alert)] = at
            if alert.state == "firing":
                self._began[identity(alert)] = at
        return began

    def _body(self, alerts: list[Alert], run: str, began: Mapping[tuple[str, str, int], float], now: float) -> bytes:
        if self._style == "alertmanager":
            body = alertmanager(alerts, run, began, now)
        else:
            body = {"slack": slack, "discord": discord}[self._style](alerts, run)
        return json.dumps(body, allow_nan=False).encode()

    def _deliver(self, write: Callable[[], bytes]) -> None:
        body, wait = write(), self._backoff
        for left in reversed(range(self._tries)):
            try:
                answer = self._post(body)
            except (OSError, HTTPException) as error:  # their texts may hold a part of the address
                answer, found = Answer(0, 0), type(error).__name__
            else:
                found = f"the receiver answered {answer.status}"
            if 200 <= answer.status < 300:
                return
            may_pass = answer.status in (0, 408, 429) or answer.status >= 500
            if not may_pass or not left:
                raise Undelivered(f"an alert could not be delivered: {found}")
            time.sleep(min(max(wait, answer.wait), LONGEST_WAIT))
            wait *= 2


def _sender(env: str, timeout: float) -> Callable[[bytes], Answer]:
    """Posts to the address in `env`, which only the function itself knows. Raises UsageError.

    Nothing raises where a local variable holds it: some tools show those of a traceback.
    """
    if not os.environ.get(env, "").strip():
        raise UsageError(f"expected the webhook's address in the environment variable {env}, found nothing; export it")
    address = _parsed(os.environ[env].strip())
    if address is None:
        raise UsageError(
            f"expected {env} to be an http:// or https:// address, found something else (not shown, it is a secret); "
            "export it again"
        )
    target = (address.path or "/") + (f"?{address.query}" if address.query else "")
    headers = {"Content-Type": "application/json", "User-Agent": f"attnwatch/{attnwatch.__version__}"}
    if address.username is not None:
        pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"

    def connect() -> HTTPConnection:
        host = address.hostname or ""
        if address.scheme == "http":
            return HTTPConnection(host, address.port or 80, timeout=timeout)
        return HTTPSConnection(host, address.port or 443, timeout=timeout, context=ssl.create_default_context())

    def post(body: bytes) -> Answer:
        with closing(connect()) as connection:
            connection.set_debuglevel(0)  # a trainer may have set that of all: it prints what is sent
            connection.connect()
            with _limit(connection.sock, 2 * timeout):
                connection.request("POST", target, body, headers)
                response = connection.getresponse()
            wait = response.headers.get("Retry-After", "")
            return Answer(response.status, float(wait) if wait.isdecimal() and wait.isascii() else 0.0)

    return post


@contextmanager
def _limit(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Ends the connection then: one that sends a byte now and then would never run into its timeout."""

    def end() -> None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, end)
    timer.name, timer.daemon = "attnwatch-webhook-limit", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _parsed(text: str) -> SplitResult | None:
    """None for what is no http or https address."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return None
    try:
        address = urlsplit(text)
        is_right = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        return None
    return address if is_right else None
