"""A real headless Chromium, driven through the DevTools protocol: opens a page and keeps all that it complains of."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import websocket

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
SECONDS = 180


def find_chromium() -> str:
    """Its path. Without one the test is skipped by name, and fails on a CI machine."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found:
        return found
    if os.environ.get("CI"):
        pytest.fail("expected chromium on the PATH, found none; install it: the report is tested in a real browser")
    pytest.skip("chromium is not installed: the report was not opened in a browser")


class Browser:
    """One browser with an empty profile and one tab.

    complaints: console messages, exceptions and security violations; requests: addresses asked for, but for the
    page itself and data within it.
    """

    def __init__(self, profile: Path) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded: set[str] = set()
        self._number = 0
        command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = self._port(profile / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
                page = next(tab for tab in json.load(answer) if tab["type"] == "page")
            self._socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=SECONDS)
            for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
                self.call(f"{domain}.enable")
            self.call("Page.setLifecycleEventsEnabled", enabled=True)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._stop()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """The result of one protocol method; what the page tells meanwhile is kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def open(self, page: Path, *, javascript: bool = True, dark: bool = False, width: int = 1280) -> None:
        """Load a file and wait until it says that it is loaded."""
        self.call("Emulation.setScriptExecutionDisabled", value=not javascript)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.complaints.clear()
        self.requests.clear()
        loader = self.call("Page.navigate", url=page.as_uri())["loaderId"]
        while loader not in self._loaded:  # that very page: a late word of the one before does not count
            self._hear(json.loads(self._socket.recv()))

    def evaluate(self, expression: str) -> Any:
        """The JSON-able value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def _hear(self, message: dict[str, Any]) -> None:
        body = message.get("params", {})
        match message.get("method"):
            case "Page.lifecycleEvent" if body["name"] == "load":
                self._loaded.add(body["loaderId"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(f"console: {[each.get('value') for each in body['args']]}")
            case "Runtime.exceptionThrown":
                self.complaints.append(f"exception: {body['exceptionDetails']}")
            case "Log.entryAdded":
                self.complaints.append(f"log: {body['entry']['text']}")
            case "Audits.issueAdded":
                self.complaints.append(f"issue: {body['issue']}")
            case "Network.requestWillBeSent":
                url = body["request"]["url"]
                if body.get("type") != "Document" and not url.startswith("data:"):
                    self.requests.append(url)

    @staticmethod
    def _port(file: Path) -> int:
        """The port that the browser says it listens on; it writes the file when it is ready."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if file.exists() and (text := file.read_text()).count("\n"):
                return int(text.splitlines()[0])
            time.sleep(0.02)
        raise TimeoutError(f"chromium did not say its port within {SECONDS} s")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
