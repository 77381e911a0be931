"""Alerts to post, and outputs that post them, for the tests of the webhook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.receiver import Receiver

from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.outputs.courier import Undelivered
from attnwatch.monitor.outputs.webhook import WebhookOutput
from attnwatch.monitor.sample import Update

SECRET = "T0SECRET"
FIRED = Alert(
    rule="sparse_low_rank",
    severity="critical",
    state="firing",
    place="model",
    pending_step=1160,
    fired_step=1200,
    resolved_step=None,
    share=0.25,
    heads=(("h.3", 5),),
    values={"entropy_ratio": 0.125},
    summary="Attention is collapsing.",
    advice="Lower the rate.",
)
MILD = replace(FIRED, rule="benign_sparsity", severity="info")
LAYER = replace(FIRED, rule="logit_growth", severity="warning", place="h.3", pending_step=1190)
PENDING = replace(FIRED, rule="entropy_collapse", severity="warning", state="pending", fired_step=None)
PASSED = replace(PENDING, state="resolved", resolved_step=1200)
RESOLVED = replace(FIRED, state="resolved", resolved_step=1300)
LINE = (
    "critical: sparse_low_rank at model firing at step 1200 (entropy_ratio 0.125, 25% of heads, worst h.3/5). "
    "Attention is collapsing. Lower the rate"
)
Hook = Callable[..., WebhookOutput]
WaitFor = Callable[..., Any]


def update(*changed: Alert, run: str = "gpt") -> Update:
    return Update(1200, None, False, {}, (), changed, (), (), 0, 0.0, Path("runs") / run)


@contextmanager
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """Makes outputs that post to a receiver, impatient ones, and closes them."""
    made: list[WebhookOutput] = []

    def make(receiver: Receiver | str, style: str = "alertmanager", **options: Any) -> WebhookOutput:
        host = receiver if isinstance(receiver, str) else receiver.host
        monkeypatch.setenv("ATTNWATCH_WEBHOOK", f"http://{host}/hooks/{SECRET}?to={SECRET}")
        made.append(WebhookOutput(style=style, **{"backoff": 0.01, **options}))
        return made[-1]

    yield make
    for output in made:
        with suppress(Undelivered):
            output.close()


def complaint(output: WebhookOutput, wait_for: WaitFor) -> str:
    """What it tells a later update of an earlier one."""
    text = wait_for(lambda: output.write(update()), "a complaint")
    assert isinstance(text, str)
    assert output.write(update()) is None, "told once"
    return text
