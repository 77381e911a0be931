"""The exporter, asked over HTTP as a scraper asks it, by promtool and by a real Prometheus server."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import attnwatch
from attnwatch.monitor.alerts import Alert
from attnwatch.monitor.outputs.prometheus import SERIES, PrometheusOutput
from attnwatch.monitor.sample import Coverage, Metric, Problem, Sample, Update, UsageError

NAN, INF = math.nan, math.inf
METRICS = (
    Metric("entropy", "nat", "Mean entropy of the rows.", "mean"),
    Metric("logit_max", "1", "Largest logit.", "max"),
    Metric("qk_rank", "directions", "Effective rank of W_q^T W_k.", "last"),
)
EMPTY = Update(0, None, False, {}, (), (), (), (), 0, 0.0)
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
HOSTILE = (
    'h.0"} 1\n# TYPE x counter\nx 1',
    "back\\slash\\",
    "new\nline\r\ttab",
    "</script><script>alert(1)</script>",
    "{layer='x'}, # é 注意 \x00\x1b[2J",
    "",
)


def sample(step: int, values: Any, layers: tuple[str, ...] = ("h.0", "h.1")) -> Sample:
    """values: `[M, L, H]` of METRICS."""
    names = tuple(metric.name for metric in METRICS)
    return Sample(step, 1e9 + step, names, layers, np.array(values, dtype=np.float32))


def alert(rule: str, severity: str, state: str, place: str = "model") -> Alert:
    return Alert(rule, severity, state, place, 10, 12, None, 0.5, (("h.1", 0),), {"entropy": 0.1}, "s", "a")


def told(before: Update, taken: Sample) -> Update:
    return replace(before, step=taken.step, sample=taken, is_new=True, samples=before.samples + 1)


def fetch(port: int, path: str = "/metrics") -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Name -> values of its labels (in the order of the labels' names) -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(fetch(port)):
        for name, labels, value, *_ in family.samples:
            found.setdefault(name, {})[tuple(labels[key] for key in sorted(labels))] = value
    return found


@pytest.fixture
def output() -> Iterator[PrometheusOutput]:
    output = PrometheusOutput(METRICS, 0)
    yield output
    output.close()


def test_layers_are_exported_as_min_mean_and_max_over_their_heads(output: PrometheusOutput) -> None:
    """NaN heads are left out, infinite ones are not, and a layer without any value is absent."""
    values = [
        [[1.0, 2.0, 6.0], [NAN, 0.5, 1.5]],
        [[-1.0, INF, 3.0], [NAN, NAN, NAN]],
        [[INF, -INF, 0.0], [4.0, NAN, NAN]],
    ]
    output.write(told(EMPTY, sample(40, values)))
    found = scrape(output.port)
    assert found["attnwatch_entropy"] == {
        ("h.0", "min"): 1.0, ("h.0", "mean"): 3.0, ("h.0", "max"): 6.0,
        ("h.1", "min"): 0.5, ("h.1", "mean"): 1.0, ("h.1", "max"): 1.5,
    }  # fmt: skip
    assert found["attnwatch_logit_max"] == {("h.0", "min"): -1.0, ("h.0", "mean"): INF, ("h.0", "max"): INF}
    rank = found["attnwatch_qk_rank"]
    assert (rank["h.0", "min"], rank["h.0", "max"], rank["h.1", "mean"]) == (-INF, INF, 4.0)
    assert math.isnan(rank["h.0", "mean"])
    assert found["attnwatch_sampled_step"] == {(): 40}


def test_the_help_of_a_metric_is_its_own(output: PrometheusOutput) -> None:
    output.write(told(EMPTY, sample(0, np.ones((3, 2, 2)))))
    helps = {family.name: family.documentation for family in text_string_to_metric_families(fetch(output.port))}
    assert {metric.help for metric in METRICS} <= set(helps.values())
    assert helps["attnwatch_qk_rank"] == "Effective rank of W_q^T W_k."


def test_numbers_from_the_weights_are_kept_until_measured_again(output: PrometheusOutput) -> None:
    """Per head, and only those: what comes from the activations is the newest sample's or absent."""
    first = told(EMPTY, sample(0, [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2, [[7.0, 9.0], [3.0, NAN]]]))
    second = told(first, sample(20, [[[NAN, NAN]] * 2, [[4.0, 4.0]] * 2, [[NAN, NAN], [NAN, 5.0]]]))
    third = told(second, sample(40, np.full((3, 2, 2), NAN)))
    for update in (first, replace(first, step=1, is_new=False), second, third, replace(third, is_new=False)):
        output.write(update)
    found = scrape(output.port)
    assert found["attnwatch_qk_rank"] == {
        ("h.0", "min"): 7.0, ("h.0", "mean"): 8.0, ("h.0", "max"): 9.0,
        ("h.1", "min"): 3.0, ("h.1", "mean"): 4.0, ("h.1", "max"): 5.0,
    }  # fmt: skip
    assert "attnwatch_entropy" not in found
    assert "attnwatch_logit_max" not in found


@pytest.mark.parametrize("state", ["logits_only", "uncovered"])
def test_numbers_from_weights_that_are_no_longer_proved_are_absent(output: PrometheusOutput, state: str) -> None:
    """Until they are measured again; those of the other layer are kept."""
    blank, again = np.full((3, 2, 2), NAN), [[[NAN] * 2] * 2, [[NAN] * 2] * 2, [[3.0] * 2, [NAN] * 2]]
    for values, now, rank in (
        (np.full((3, 2, 2), 7.0), "verified", 7.0),
        (blank, state, None),
        (blank, "verified", None),
        (again, "verified", 3.0),
    ):
        known = Coverage("h.0", now), Coverage("h.1", "verified")
        output.write(replace(told(EMPTY, sample(0, values)), coverage=known))
        found = scrape(output.port)["attnwatch_qk_rank"]
        assert (found.get(("h.0", "max")), found["h.1", "max"]) == (rank, 7.0)


def test_other_layers_start_without_a_past(output: PrometheusOutput) -> None:
    """A row of another layout is never taken for a layer's own."""
    output.write(told(EMPTY, sample(0, np.ones((3, 2, 2)))))
    output.write(told(EMPTY, sample(20, np.full((3, 2, 2), NAN), layers=("h.1", "h.2"))))
    assert "attnwatch_qk_rank" not in scrape(output.port)


def test_before_the_first_update_nothing_is_measured_and_no_alert_fires(output: PrometheusOutput) -> None:
    assert scrape(output.port) == {
        "attnwatch_info": {(attnwatch.__version__,): 1},
        "attnwatch_alerts_firing": {("info",): 0, ("warning",): 0, ("critical",): 0},
    }


def test_alerts_by_state_and_by_severity(output: PrometheusOutput) -> None:
    """An alert that came back counts once, in its newest state."""
    alerts = (
        alert("collapse", "critical", "resolved"),
        alert("growth", "info", "resolved", "h.1/3"),
        alert("collapse", "critical", "firing"),
        alert("collapse", "critical", "firing", "h.0"),
        alert("loss", "warning", "pending"),
    )
    output.write(replace(EMPTY, alerts=alerts))
    found = scrape(output.port)
    assert found["attnwatch_alert_state"] == {  # labels by name: place, rule, severity
        ("model", "collapse", "critical"): 2,
        ("h.0", "collapse", "critical"): 2,
        ("h.1/3", "growth", "info"): 0,
        ("model", "loss", "warning"): 1,
    }
    assert found["attnwatch_alerts_firing"] == {("info",): 0, ("warning",): 0, ("critical",): 2}
    output.write(EMPTY)
    assert "attnwatch_alert_state" not in scrape(output.port)


@pytest.mark.parametrize(("loss", "nonfinite"), [(2.5, 0), (NAN, 1), (INF, 1), (-INF, 1)])
def test_a_loss_that_is_no_number_is_said_as_a_number(output: PrometheusOutput, loss: float, nonfinite: int) -> None:
    output.write(replace(EMPTY, step=7, scalars={"loss": loss}))
    found = scrape(output.port)
    assert found["attnwatch_loss"][()] == pytest.approx(loss, nan_ok=True)
    assert found["attnwatch_loss_nonfinite"] == {(): nonfinite}
    assert found["attnwatch_step"] == {(): 7}


def test_scalars_have_the_names_that_rules_use(output: PrometheusOutput) -> None:
    """`loss`, `grad_norm` and `lr` by themselves, any other one by the label of `scalar`."""
    output.write(replace(EMPTY, scalars={"lr": 0.1, "grad_norm": 2.0, "tokens": 3e9}))
    found = scrape(output.port)
    assert found["attnwatch_lr"] == {(): 0.1}
    assert found["attnwatch_grad_norm"] == {(): 2.0}
    assert found["attnwatch_scalar"] == {("tokens",): 3e9}
    assert "attnwatch_loss" not in found
    assert "attnwatch_loss_nonfinite" not in found


def test_coverage_problems_and_cost(output: PrometheusOutput) -> None:
    coverage = (Coverage("h.0", "verified"), Coverage("h.1", "uncovered"), Coverage("h.2", "verified"))
    problems = (Problem(3, "h.1", "no call seen"), Problem(4, "webhook", "refused"), Problem(9, "h.1", "gone"))
    output.write(replace(EMPTY, coverage=coverage, problems=problems, samples=5, seconds=0.25))
    found = scrape(output.port)
    assert found["attnwatch_layers"] == {("verified",): 2, ("logits_only",): 0, ("uncovered",): 1}
    assert found["attnwatch_layer_coverage"] == {
        ("h.0", "verified"): 1, ("h.1", "uncovered"): 1, ("h.2", "verified"): 1
    }  # fmt: skip
    assert found["attnwatch_problems"] == {(): 3}
    assert found["attnwatch_problem"] == {("h.1",): 2, ("webhook",): 1}
    assert found["attnwatch_samples_total"] == {(): 5}
    assert found["attnwatch_sampling_seconds_total"] == {(): 0.25}


def full_update(layers: tuple[str, ...]) -> Update:
    """An update that fills every name there is, with one firing critical alert."""
    scalars = {"loss": NAN, "grad_norm": INF, "lr": 1e-3, **dict.fromkeys(layers, 2.0)}
    return Update(
        step=100,
        sample=sample(80, np.arange(3 * len(layers) * 2).reshape(3, len(layers), 2), layers),
        is_new=True,
        scalars=scalars,
        alerts=(alert("collapse", "critical", "firing"), *(alert(x, "info", "pending", x) for x in layers)),
        changed=(),
        coverage=tuple(Coverage(layer, "verified") for layer in layers),
        problems=tuple(Problem(1, layer, layer) for layer in layers),
        samples=5,
        seconds=0.5,
    )


def test_every_name_of_the_table_is_exported_and_no_other(output: PrometheusOutput) -> None:
    output.write(full_update(("h.0",)))
    metrics = {f"attnwatch_{metric.name}" for metric in METRICS}
    assert set(scrape(output.port)) == {series.name for series in SERIES} | metrics


def test_promtool_has_no_complaint(output: PrometheusOutput, program: Callable[[str], str]) -> None:
    """Names, types and help are what Prometheus asks for, with hostile layers too."""
    output.write(full_update(HOSTILE))
    text = fetch(output.port).encode()
    check = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_a_name_without_utf8_form_is_written_out(output: PrometheusOutput) -> None:
    """A module may be called so, and the other layers must still be seen."""
    output.write(full_update(("h.\ud800", "h.1")))
    assert scrape(output.port)["attnwatch_entropy"]["h.\\ud800", "max"] == 1.0


def test_a_real_prometheus_sees_a_run_from_alert_to_end(
    prometheus: Callable[[int], Callable[[str], dict[tuple[str, ...], float]]], wait_for: Callable[..., Any]
) -> None:
    """The queries a user would write, hostile names included; after `close` nothing stale is left."""
    output = PrometheusOutput(METRICS, 0)
    output.write(full_update(HOSTILE))
    query = prometheus(output.port)
    firing = wait_for(lambda: query('attnwatch_alerts_firing{severity="critical"} > 0'), "a firing alert")
    assert firing == {("critical",): 1}
    assert query("attnwatch_loss_nonfinite == 1") == {(): 1}
    assert query("attnwatch_loss > 0") == {}  # the trap that attnwatch_loss_nonfinite is for
    assert query('attnwatch_alert_state{rule="collapse"} == 2') == {("model", "collapse", "critical"): 2}
    assert query('attnwatch_layers{state="verified"}') == {("verified",): len(HOSTILE)}
    # The heads of layer i have the entropies 2 i and 2 i + 1. Prometheus holds an empty label to be no label.
    entropy = {(layer, "mean") if layer else ("mean",): 2 * i + 0.5 for i, layer in enumerate(HOSTILE)}
    assert query('attnwatch_entropy{stat="mean"}') == entropy

    output.write(replace(full_update(("h.0",)), alerts=(alert("collapse", "critical", "resolved"),)))
    wait_for(lambda: query('attnwatch_alert_state{rule="collapse"} == 0'), "the alert to resolve")
    assert query('attnwatch_entropy{stat="max"}') == {("h.0", "max"): 1.0}

    output.close()
    wait_for(lambda: query("up == 0"), "the endpoint to be gone")
    assert query('{__name__=~"attnwatch_.+"}') == {}


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/metrics/x", "/metricsx"])
def test_only_metrics_answers(output: PrometheusOutput, path: str) -> None:
    with pytest.raises(HTTPError, match="404") as error:
        fetch(output.port, path)
    error.value.close()


@pytest.mark.parametrize("port", [-1, 65536, True, "9464", 9464.0, None])
def test_what_is_no_port_is_one_clear_line(port: Any) -> None:
    with pytest.raises(UsageError) as error:
        PrometheusOutput(METRICS, port)
    assert str(error.value) == (
        f"prometheus: expected a port from 0 to 65535, found {port!r}; pass prometheus=0 to let the system pick"
    )


def test_only_this_machine_is_listened_to(output: PrometheusOutput) -> None:
    """Another address of this machine, even another loopback one, is refused."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", output.port), timeout=5)


def test_close_frees_the_port_and_ends_the_thread() -> None:
    output = PrometheusOutput(METRICS, 0)
    fetch(output.port)
    output.close()
    output.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "attnwatch-prometheus"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", output.port), timeout=5)
    again = PrometheusOutput(METRICS, output.port)
    fetch(again.port)
    again.close()


FORKED = """
import os, socket, sys
from attnwatch.monitor.outputs.prometheus import PrometheusOutput
output = PrometheusOutput((), 0)
waits, wakes = os.pipe()
worker = os.fork()
if worker == 0:
    os.close(wakes)
    os.read(waits, 1)
    os._exit(0)
output.close()
try:
    socket.create_connection(("127.0.0.1", output.port), timeout=5)
except ConnectionRefusedError:
    PrometheusOutput((), output.port).close()
    print("free")
os.close(wakes)
os.waitpid(worker, 0)
"""


def test_a_forked_worker_does_not_keep_the_port() -> None:
    """Data-loading workers inherit the socket and may outlive the run."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("free\n", "")


def test_idle_and_slow_clients_block_nobody(output: PrometheusOutput) -> None:
    """Neither the next scrape nor the close."""
    output.write(full_update(tuple(f"h.{i}" for i in range(2000))))  # more than the socket's buffers hold
    clients = [socket.create_connection(("127.0.0.1", output.port)) for _ in range(20)]
    for client in clients[:10]:
        client.sendall(REQUEST)  # and never reads
    assert "attnwatch_step 100.0\n" in fetch(output.port)
    output.close()
    for client in clients[10:]:
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # still connected: the close did not wait for it
            client.recv(1)
    for client in clients:
        client.close()


def test_each_of_many_scrapes_sees_one_whole_update(output: PrometheusOutput) -> None:
    """While updates are written, step, loss and every layer of one answer belong together."""
    updates = [
        replace(told(EMPTY, sample(step, np.full((3, 2, 2), step))), scalars={"loss": float(step)}, samples=step)
        for step in range(1, 201)
    ]
    output.write(updates[0])
    done = threading.Event()
    seen: list[set[float]] = []

    def scrape_on() -> None:
        while not done.is_set():
            found = scrape(output.port)
            names = ("step", "sampled_step", "loss", "samples_total", "entropy", "qk_rank")
            seen.append({value for name in names for value in found[f"attnwatch_{name}"].values()})

    threads = [threading.Thread(target=scrape_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 40 and any(thread.is_alive() for thread in threads):
        for update in updates:
            output.write(update)
    done.set()
    for thread in threads:
        thread.join()
    assert len(seen) >= 40
    assert all(len(values) == 1 for values in seen)
    assert len(set.union(*seen)) > 1


def test_a_client_that_hangs_up_is_no_news(
    output: PrometheusOutput,
    wait_for: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is logged, nor printed into the trainer's terminal."""
    output.write(full_update(tuple(f"h.{i}" for i in range(2000))))
    before = set(threading.enumerate())
    for _ in range(5):
        client = socket.create_connection(("127.0.0.1", output.port))
        client.sendall(REQUEST)
        client.recv(1)
        client.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the server to be done with them")
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
