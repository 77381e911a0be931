"""Alerts posted over real HTTP: what arrives, and that the address stays a secret."""

from __future__ import annotations

import json
import re
import subprocess
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from tests import monitoring
from tests.receiver import Receiver
from tests.webhooks import (
    FIRED,
    LAYER,
    LINE,
    MILD,
    PASSED,
    PENDING,
    RESOLVED,
    SECRET,
    Hook,
    WaitFor,
    complaint,
    hooks,
    update,
)

import attnwatch
from attnwatch.monitor.outputs.notices import fingerprint
from attnwatch.monitor.outputs.webhook import WebhookOutput
from attnwatch.monitor.sample import UsageError


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    with hooks(monkeypatch) as make:
        yield make


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_an_update_is_one_request_with_all_that_fired_or_resolved(hook: Hook, wait_for: WaitFor) -> None:
    """Not what is pending, passed unseen, or is too mild; and an update without news posts nothing."""
    with Receiver() as receiver:
        output = hook(receiver)
        output.write(update())
        output.write(update(MILD, PENDING, PASSED))
        output.write(update(FIRED, LAYER, PENDING))
        output.close()
        (posted,) = receiver.posted
    assert (posted.method, posted.path) == ("POST", f"/hooks/{SECRET}?to={SECRET}")
    assert posted.headers["Content-Type"] == "application/json"
    assert posted.headers["User-Agent"] == f"attnwatch/{attnwatch.__version__}"
    body = posted.json
    began = [alert.pop("startsAt") for alert in body["alerts"]]
    assert all(abs(datetime.fromisoformat(time_).timestamp() - time.time()) < 60 for time_ in began)
    labels = {"alertname": "sparse_low_rank", "place": "model", "run": "gpt", "severity": "critical"}
    layer = {"alertname": "logit_growth", "place": "h.3", "run": "gpt", "severity": "warning"}
    assert body == {
        "receiver": "attnwatch",
        "status": "firing",
        "alerts": [
            {
                "status": "firing",
                "labels": labels,
                "annotations": {"summary": "Attention is collapsing.", "description": LINE, "step": "1200"},
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "",
                "fingerprint": fingerprint(labels),
            },
            {
                "status": "firing",
                "labels": layer,
                "annotations": {
                    "summary": "Attention is collapsing.",
                    "description": LINE.replace("critical", "warning")
                    .replace("sparse_low_rank", "logit_growth")
                    .replace("at model", "at h.3"),
                    "step": "1200",
                },
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "",
                "fingerprint": fingerprint(layer),
            },
        ],
        "groupLabels": {"run": "gpt"},
        "commonLabels": {"run": "gpt"},
        "commonAnnotations": {"summary": "Attention is collapsing.", "step": "1200"},
        "externalURL": "",
        "version": "4",
        "groupKey": '{}:{run="gpt"}',
        "truncatedAlerts": 0,
    }


def test_what_resolves_began_when_it_fired(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver() as receiver:
        output = hook(receiver)
        output.write(update(FIRED))
        output.write(update(RESOLVED))
        fired, resolved = receiver.bodies(2, wait_for)
    (first,), (second,) = fired["alerts"], resolved["alerts"]
    assert (resolved["status"], second["status"]) == ("resolved", "resolved")
    assert first["startsAt"] == second["startsAt"] <= second["endsAt"]
    assert (first["fingerprint"], first["labels"]) == (second["fingerprint"], second["labels"])
    assert second["annotations"]["description"].endswith("resolved at step 1300 (fired at step 1200)")


def test_info_is_posted_when_asked_for(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver() as receiver:
        hook(receiver, min_severity="info").write(update(MILD))
        assert receiver.bodies(1, wait_for)[0]["commonLabels"]["severity"] == "info"


def test_slack_gets_a_line_for_each_and_no_mention(hook: Hook, wait_for: WaitFor) -> None:
    hostile = replace(FIRED, place="<!channel>&\n", summary="", advice="", values={}, heads=())
    with Receiver() as receiver:
        hook(receiver, "slack").write(update(FIRED, hostile))
        (body,) = receiver.bodies(1, wait_for)
    second = "[gpt] critical: sparse_low_rank at &lt;!channel&gt;&amp;\\n firing at step 1200"
    assert body == {"text": f"[gpt] {LINE}\n{second}"}


def test_discord_gets_what_fits_and_mentions_nobody(hook: Hook, wait_for: WaitFor) -> None:
    with Receiver() as receiver:
        hook(receiver, "discord").write(update(FIRED, replace(FIRED, summary="@everyone " * 300)))
        (body,) = receiver.bodies(1, wait_for)
    assert body["content"].startswith(f"[gpt] {LINE}\n[gpt] critical: sparse_low_rank")
    assert (len(body["content"]), body["content"][-1]) == (2000, "…")
    assert body["allowed_mentions"] == {"parse": []}


def test_it_has_the_shape_that_a_real_alertmanager_posts(
    program: Callable[[str], str], wait_for: WaitFor, hook: Hook, tmp_path: Path
) -> None:
    """The same alert posted by both: the same keys, types, statuses, fingerprint, group key and common labels."""
    labels = {"alertname": "sparse_low_rank", "place": "model", "run": "gpt é", "severity": "critical"}
    with Receiver() as receiver:
        address = f"127.0.0.1:{monitoring.free_port()}"
        route = {"receiver": "attnwatch", "group_by": ["run"], "group_wait": "0s", "group_interval": "1s"}
        hooks = [{"url": f"http://{receiver.host}/alertmanager"}]
        config = {"route": route, "receivers": [{"name": "attnwatch", "webhook_configs": hooks}]}
        (tmp_path / "alertmanager.yml").write_text(json.dumps(config))  # JSON is YAML
        flags = [f"--web.listen-address={address}", f"--storage.path={tmp_path}", "--cluster.listen-address="]
        flags.append(f"--config.file={tmp_path / 'alertmanager.yml'}")
        command = [program("prometheus-alertmanager"), *flags]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
            try:
                alert = {"labels": labels, "annotations": {"summary": "Attention is collapsing."}}

                def accepted() -> bool:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    request = urllib.request.Request(
                        f"http://{address}/api/v2/alerts",
                        json.dumps([alert]).encode(),
                        {"Content-Type": "application/json"},
                    )
                    try:
                        with urllib.request.urlopen(request, timeout=30):
                            return True
                    except (OSError, HTTPException):
                        return False

                wait_for(accepted, "Alertmanager to start")
                theirs = [receiver.bodies(1, wait_for)[0]]
                alert["endsAt"] = datetime.now().astimezone().isoformat()
                wait_for(accepted, "the end of the alert to be taken")
                theirs.append(receiver.bodies(2, wait_for)[1])
            finally:
                server.terminate()
        with Receiver() as own:
            output = hook(own)
            output.write(update(FIRED, run="gpt é"))
            output.write(update(RESOLVED, run="gpt é"))
            ours = own.bodies(2, wait_for)
    for our, their in zip(ours, theirs, strict=True):
        assert shape(our) == shape(their)
        (a,), (b,) = our["alerts"], their["alerts"]
        assert (a["labels"], a["fingerprint"], a["status"]) == (labels, b["fingerprint"], b["status"])
        for same in ("status", "version", "receiver", "groupLabels", "commonLabels", "groupKey", "truncatedAlerts"):
            assert our[same] == their[same], same
    assert ours[0]["alerts"][0]["endsAt"] == theirs[0]["alerts"][0]["endsAt"]


def shape(value: Any) -> Any:
    """Keys and types; of annotations, which are free, that they are texts."""
    if isinstance(value, dict):
        return {
            key: {type(text) for text in item.values()} | {str} if key.endswith("nnotations") else shape(item)
            for key, item in value.items()
        }
    return [shape(item) for item in value] if isinstance(value, list) else type(value)


# --- a secret ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        f"ftp://host/{SECRET}", f"file:///{SECRET}", SECRET, f"//host/{SECRET}", f"http:///{SECRET}",
        f"http://[{SECRET}/x", f"http://host:{SECRET}/", f"http://host:70000/{SECRET}", f"http://host:0/{SECRET}",
        f"http://host/ü{SECRET}", f"http://host/ {SECRET}", f"http://host/{SECRET}\r\nX: y",
    ],
)  # fmt: skip
def test_a_wrong_address_is_one_line_without_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNWATCH_WEBHOOK", address)
    with pytest.raises(UsageError) as raised:
        WebhookOutput()
    error: BaseException | None = raised.value
    assert str(error) == (
        "expected ATTNWATCH_WEBHOOK to be an http:// or https:// address, found something else (not shown, it is a "
        "secret); export it again"
    )
    assert raised.value.__cause__ is None
    # Some tools show the local variables of a traceback.
    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)][1:]
    assert SECRET not in str([frame.f_locals for frame in frames])
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_no_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNWATCH_WEBHOOK", raising=False)
    with pytest.raises(UsageError, match=r"^expected the webhook's address in the environment variable ATTNWATCH_WEB"):
        WebhookOutput()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"style": "teams"}, "expected style to be one of alertmanager"),
        ({"min_severity": "grave"}, "expected min_severity to be one of info"),
        ({"tries": 0}, "expected tries to be a whole number of at least 1, found 0"),
        ({"tries": 2.0}, "expected tries to be a whole number of at least 1, found 2.0"),
        ({"timeout": None}, "expected timeout to be seconds, at least 0.001, found None"),
        ({"timeout": 0}, "expected timeout to be seconds, at least 0.001, found 0"),
        ({"backoff": -1}, "expected backoff to be seconds, at least 0, found -1"),
        ({"patience": float("nan")}, "expected patience to be seconds, at least 0, found nan"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above all one with which nothing would ever be posted."""
    monkeypatch.setenv("ATTNWATCH_WEBHOOK", "http://localhost/")
    with pytest.raises(UsageError) as raised:
        WebhookOutput(**options)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("host", ["no-such-host.invalid", f"a..{SECRET}"])
def test_a_host_that_does_not_exist_is_named_without_its_name(hook: Hook, wait_for: WaitFor, host: str) -> None:
    output = hook(host, tries=1)
    output.write(update(FIRED))
    text = complaint(output, wait_for)
    assert re.fullmatch(r"an (alert|update) could not be delivered: \w+", text)
    assert host not in text


def test_the_object_does_not_show_it(hook: Hook) -> None:
    output = hook("localhost:9")
    assert SECRET not in repr(output) + str(output) + str(vars(output)) + repr(output._post)
