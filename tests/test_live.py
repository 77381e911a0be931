"""`attnwatch live` in a real terminal: what it shows, its keys, and a terminal that is given back whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests import made_runs
from tests.terminals import Window, stopped

from attnwatch.monitor.sample import Coverage, Sample
from attnwatch.monitor.store import RunWriter

COMMAND = Path(sys.executable).with_name("attnwatch")
METRICS = ("entropy_ratio", "qk_rank_ratio", "spread_ratio")
FAST = ("--every", "0.1")

WRITER = """
import sys, time
import numpy as np
from tests import made_runs
from attnwatch.monitor.sample import Coverage, Sample
from attnwatch.monitor.store import RunWriter

metrics, began = ("entropy_ratio", "qk_rank_ratio", "spread_ratio"), time.time() - 1000
writer = RunWriter(sys.argv[1], made_runs.header(metrics))
made_runs.write_coverage(writer, [Coverage(name, "verified", 2, 2, 16) for name in ("a", "b")])
for line in sys.stdin:  # a step for each number that is asked for
    step = int(line)
    values = np.full((3, 2, 2), 0.4, np.float32)
    writer.scalars(step, {"loss": 4 - step / 100})
    writer.sample(Sample(step, began + step, metrics, ("a", "b"), values, 0.01))
"""


def live(*arguments: str | Path) -> list[str | Path]:
    return [COMMAND, "live", *arguments, *FAST]


def once(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "live", "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def write(path: Path, layers: list[Coverage], values: np.ndarray, *, times: float = 0.0, ends: bool = True) -> Path:
    """A run with these values `[S, M, L, H]` of its first layers, one sample every ten seconds."""
    writer = RunWriter(path, made_runs.header(METRICS))
    made_runs.write_coverage(writer, layers)
    names = tuple(layer.name for layer in layers[: values.shape[2]])
    for number, sample in enumerate(values.astype(np.float32)):
        writer.sample(Sample(20 * number, times + 10.0 * number, METRICS, names, sample, 0.01))
    if ends:
        made_runs.write_end(writer, 20 * len(values), len(values))
    writer.close()
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_runs.collapse(tmp_path_factory.mktemp("live") / "plain")


# --- the screen and its keys ------------------------------------------------------------------------------------------


def test_the_screen_shows_the_run_and_q_gives_the_terminal_back(plain: Path) -> None:
    with Window(live(plain)) as window:
        screen = window.sees("Alerts: 4 firing, 1 resolved")
        assert "attnwatch  plain  ended  step 800  81 samples" in screen
        assert "The loss diverged from step 688; attention had given warning 168 steps before" in screen
        assert "12 of 12 attention layers verified" in screen
        assert re.search(r"^loss \d.* at step 800, lowest \d.* [▁-█]{20}", screen, re.MULTILINE)
        assert "entropy_ratio, 12 layers, 4 heads" in screen
        assert "critical loss_divergence at model since step 728" in screen
        rows = re.findall(r"^[> ] *(\d+) (\S) (\S) (\S) (\S)$", screen, re.MULTILINE)
        assert [int(row[0]) for row in rows] == list(range(12))
        assert window.screen.cursor.hidden
        window.type("q")
        assert window.ends() == 0
        assert window.is_given_back()


def test_keys_choose_metric_layer_head_and_page(plain: Path) -> None:
    with Window(live(plain)) as window:
        window.sees("> blocks.0.attention head 0: entropy_ratio")
        window.type("m")
        window.sees("sink_mass, 12 layers, 4 heads")
        window.type("MM")
        window.sees("entropy, 12 layers, 4 heads")
        window.type("\x1b[B\x1b[Bj\x1b[C")
        window.sees("> blocks.3.attention head 1: entropy")
        window.type("k\x1bOA\x1b[D\x1b[F")
        window.sees("> blocks.1.attention head 3: entropy")
        window.type("\r")
        screen = window.sees("blocks.1.attention head 3", "entropy: 81 of 81 samples, from", "qk_rank_ratio")
        assert ">entropy " in screen
        window.type("d?")
        window.sees("Keys", "quit; training goes on")
        window.type("?")
        window.sees("> blocks.1.attention head 3: entropy")
        window.type("q")
        assert window.ends() == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_a_deadly_signal_ends_the_process_as_it_should_and_gives_the_terminal_back(plain: Path, end: int) -> None:
    with Window(live(plain)) as window:
        window.sees("Alerts:")
        window.process.send_signal(end)
        assert window.ends() == -end
        assert window.is_given_back()
        assert "Traceback" not in window.text


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_interrupt_the_giving_back(plain: Path, second: int) -> None:
    with Window(live(plain)) as window:
        window.sees("Alerts:")
        window.type("\x03")
        window.process.send_signal(second)
        assert window.ends() in (130, -second)
        assert window.is_given_back()
        assert "Traceback" not in window.text


def test_ctrl_s_holds_nothing_that_a_signal_would_have_to_wait_for(plain: Path) -> None:
    with Window(live(plain)) as window:
        window.sees("Alerts:")
        window.type("\x13m")
        window.sees("sink_mass, 12 layers")
        window.process.send_signal(signal.SIGTERM)
        assert window.ends() == -signal.SIGTERM
        assert window.is_given_back()


def test_a_stopped_screen_is_killed_and_leaves_the_shell_its_terminal(plain: Path) -> None:
    with stopped(f"{COMMAND} live {plain} --every 0.1", "Alerts:") as window:
        window.type("kill %1; while kill -0 %1 2>/dev/null; do sleep 0.05; done; exit 7\n")
        assert window.ends() == 7


def test_ctrl_c_gives_the_terminal_back(plain: Path) -> None:
    with Window(live(plain)) as window:
        window.sees("Alerts:")
        window.type("\x03")
        assert window.ends() == 130
        assert window.is_given_back()
        assert "Traceback" not in window.text


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(plain: Path) -> None:
    with stopped(f"{COMMAND} live {plain} --every 0.1", "Alerts:") as window:
        assert not window.screen.cursor.hidden
        window.type("clear; fg\n")
        window.sees("Alerts: 4 firing", not_="Stopped")
        assert window.screen.cursor.hidden
        window.type("q")
        window.until(lambda: not window.screen.cursor.hidden)  # what is typed from here on is for the shell
        window.type("exit 7\n")
        assert window.ends() == 7
        assert not window.screen.cursor.hidden


def test_a_resized_window_is_filled_anew_and_nothing_is_wider_than_it(plain: Path) -> None:
    with Window(live(plain)) as window:
        window.sees("12 layers, 4 heads")
        window.resize(40, 20)
        screen = window.sees("layers 0-", "of 12", "q quit")
        assert "The loss diverged from step 688" in screen
        window.type("jjjjjjjjjj")
        window.sees(">10 ")
        window.resize(10, 3)
        window.sees("q quit", not_="layers")
        assert len(window.text.splitlines()) == 3
        window.resize(120, 50)
        window.sees("12 layers, 4 heads", "Alerts: 4 firing, 1 resolved", "q quit")


def test_a_huge_model_scrolls_with_the_chosen_head(tmp_path: Path) -> None:
    values = np.full((1, 3, 96, 128), 0.8)
    values[0, 0, 70, 100] = 0.0
    layers = [Coverage(f"model.layers.{index}.self_attn", "verified", 128, 128, 64) for index in range(96)]
    with Window(live(write(tmp_path / "run", layers, values)), columns=80, lines=30) as window:
        screen = window.sees("layers 0-", "of 96", "heads 0-")
        assert "lowest 0 at 70/100" in screen  # though it is not in the part shown
        window.type("\x1b[6~" * 7 + "\x1b[F" + "\x1b[D" * 27)
        screen = window.sees("> model.layers.70.self_attn head 100: entropy_ratio 0")
        row = re.search(r"^>70 ([09]+)", screen, re.MULTILINE)
        assert row is not None
        assert row[1].count("9") == 1
        ruler = next(line for line in screen.splitlines() if re.fullmatch(r"[\sv\d]+", line) and "v" in line)
        assert ruler.index("v") == row.start(1) - row.start() + row[1].index("9")


# --- runs that are being written --------------------------------------------------------------------------------------


def test_it_waits_for_a_run_follows_it_and_says_when_its_trainer_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Window(live(path)) as window:
        window.sees("Waiting for a run in")
        command = [sys.executable, "-c", WRITER, path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as writer:
            assert writer.stdin is not None
            window.sees("run  running  no step yet  0 samples", "Could not tell", "No sample yet")
            for step in range(0, 60, 20):
                print(step, file=writer.stdin, flush=True)
                count = f"{step // 20 + 1} sample{'s' if step else ''}"
                window.sees(f"step {step}  {count}", f"loss {4 - step / 100:.4g} at step {step}")
            print(1000, file=writer.stdin, flush=True)
            window.sees("run  running  step 1,000  4 samples", "(one every 20 s)")
            writer.kill()
        old = time.time() - 900
        for name in ("scalars.jsonl", "events.jsonl"):
            os.utime(path / name, (old, old))
        window.type("q")
        assert window.ends() == 0


def test_silence_is_measured_against_the_pace_of_the_run(tmp_path: Path) -> None:
    """Samples every 10 s, none for 10 minutes; the last scalars came just now, then long ago."""
    layers = [Coverage("a", "verified", 2, 2, 16)]
    path = write(tmp_path / "run", layers, np.full((10, 3, 1, 2), 0.5), times=time.time() - 690, ends=False)
    said = once(path).stdout
    assert "run  silent  step 180  10 samples" in said
    assert "! No new sample for 10 min (one every 10 s); scalars or events are still written." in said
    for name in ("scalars.jsonl", "events.jsonl"):
        os.utime(path / name, (time.time() - 600, time.time() - 600))
    assert "(one every 10 s); nothing is written: ended by force, stopped or paused?" in once(path).stdout


def test_an_empty_run_and_a_truncated_one_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    RunWriter(tmp_path / "empty", made_runs.header(METRICS)).close()
    said = once(tmp_path / "empty")
    assert (said.returncode, said.stderr) == (0, "")
    assert "Could not tell whether attention is healthy: no sample was recorded." in said.stdout
    assert "No layer is known yet" in said.stdout
    assert "Alerts: none" in said.stdout

    path = write(tmp_path / "cut", [Coverage("a", "verified", 2, 2, 16)], np.full((3, 3, 1, 2), 0.5))
    for file in (path / "samples" / "rank00000-000001.awlog", path / "events.jsonl"):
        file.write_bytes(file.read_bytes()[:-7])
    said = once(path)
    assert (said.returncode, said.stderr) == (0, "")
    assert "2 samples" in said.stdout
    assert "ended" not in said.stdout.splitlines()[0]


def test_uncovered_layers_and_missing_numbers_never_look_healthy(tmp_path: Path) -> None:
    """c was never sampled, b has one head less, and the spectrum of b is not known."""
    layers = [
        Coverage("x.a", "verified", 3, 3, 16), Coverage("x.b", "logits_only", 2, 2, 16),
        Coverage("x.c", "uncovered", note="no attention call was seen"),
    ]  # fmt: skip
    values = np.full((2, 3, 2, 3), np.nan)
    values[:, 0] = [[0.8, 0.39, 0.0], [np.inf, 0.1, np.nan]]  # from .8 to 0 these are 0, .51, 1 of the way; .88
    values[:, 1, 0] = 0.2
    path = write(tmp_path / "run", layers, values)
    rows = once(path).stdout
    assert re.search(r"^>a 0 5 9$", rows, re.MULTILINE)
    assert re.search(r"^ b ! 8$", rows, re.MULTILINE)
    assert re.search(r"^ c uncovered: no attention call was seen$", rows, re.MULTILINE)
    assert "- not measured" not in rows
    assert "1 uncovered (x.c)" in rows
    spectrum = once(path, "--metric", "qk_rank_ratio").stdout
    assert re.search(r"^>a 9 9 9$", spectrum, re.MULTILINE)
    assert re.search(r"^ b - -$", spectrum, re.MULTILINE)
    assert "- not measured" in spectrum


def test_a_scan_shows_what_weights_know(tmp_path: Path) -> None:
    """Not entropy, nor a loss, nor a share of the time between its files."""
    path = write(tmp_path / "run", [Coverage("a", "verified", 3, 3, 16)], np.full((2, 3, 1, 3), 0.2))
    header = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(header | {"source": "checkpoints"}))
    said = once(path).stdout
    assert "qk_rank_ratio, 1 layer, 3 heads" in said
    assert "Saved weights know no loss." in said
    assert "of the time" not in said


def test_what_a_low_screen_has_no_room_for_is_counted(tmp_path: Path) -> None:
    with Window(live(made_runs.collapse(tmp_path / "run", steps=60)), columns=80, lines=18) as window:
        window.sees("of 12, 4 heads")
        window.type("d")
        screen = window.sees("more lines: a higher window shows them")
        assert "logit_max" in screen


def test_of_several_runs_the_newest_is_shown_and_ranks_are_counted(tmp_path: Path) -> None:
    for index, name in enumerate(("old", "new")):
        path = made_runs.collapse(tmp_path / "runs" / name, collapses=False, layers=1, steps=20)
        os.utime(path / "run.json", (1e9 + index, 1e9 + index))
    said = once(tmp_path / "runs").stdout.splitlines()
    assert said[0].startswith("attnwatch  new  ")
    assert said[1] == f"the newest of 2 runs in {tmp_path / 'runs'}"
    (path / "samples" / "rank00001-000001.awlog").write_bytes(b"")
    assert "  2 ranks" in once(path).stdout.splitlines()[0]
    for rank in range(3):
        made_runs.collapse(tmp_path / "apart" / f"rank{rank:05d}", collapses=False, layers=1, steps=20)
    said = once(tmp_path / "apart").stdout.splitlines()
    assert said[0].startswith("attnwatch  rank00000  ")
    assert said[1] == "rank00000, one of 3 ranks recorded apart"


# --- plain frames -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--once",)])
def test_without_a_terminal_one_plain_frame_is_printed(plain: Path, arguments: tuple[str, ...]) -> None:
    forced = {**os.environ, "FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [COMMAND, "live", plain, *arguments], capture_output=True, text=True, env=forced, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith("\n")
    assert "Alerts: 4 firing, 1 resolved" in done.stdout
    assert "quit" not in done.stdout


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_terminal_that_wants_no_escapes_gets_none(plain: Path, environment: dict[str, str]) -> None:
    with Window(live(plain), columns=60, **environment) as window:
        assert window.ends() == 0
        assert b"\x1b" not in window.raw
        assert window.raw.endswith(b"\n")
        assert max(map(len, window.raw.decode().splitlines())) <= 60


def test_what_is_no_run_is_one_line_and_the_terminal_is_given_back(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = [
        (tmp_path / "missing", "found nothing"), (tmp_path / "file", "found the file"),
        (tmp_path, "without run.json"),
    ]  # fmt: skip
    for path, found in cases:
        done = once(path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"attnwatch: expected [^\n]+\n", done.stderr)
        assert found in done.stderr
    assert "at least 0.05 seconds, found 0" in once(plain, "--every", "0").stderr
    assert "at least 0.05 seconds, found nan" in once(plain, "--every", "nan").stderr
    with Window(live(plain, "--metric", "entropy_ration")) as window:
        assert window.ends() == 2
        assert window.is_given_back()
        assert "expected a metric of this run, found 'entropy_ration'; there are:" in window.text.replace("\n", "")


def test_hostile_names_reach_the_terminal_written_out(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e[red]\r\n%s"
    path = write(tmp_path / "run", [Coverage(evil, "uncovered", note=evil)], np.full((2, 3, 1, 2), 0.5), ends=False)
    alert = made_runs.alert(evil, place=evil, summary=evil, heads=((evil, 0),))
    with (path / "events.jsonl").open("a") as events:
        for event in (
            {"event": "alert", "step": 540, **vars(alert)},
            {"event": "problem", "step": 3, "where": evil, "text": evil},
        ):
            events.write(json.dumps(event) + "\n")
    with (path / "scalars.jsonl").open("a") as scalars:
        scalars.write(json.dumps({"step": 1, evil: 2.0}) + "\n")
    with Window(live(path)) as window:
        window.sees("Problems: 1", "\\x1b]0;owned\\x07")
        window.type("d")
        window.sees("entropy_ratio: 2 of 2 samples")
        window.type("q")
        assert window.ends() == 0
        assert [raw for raw in (b"\x1b]0;", b"\x07", "\u202e".encode()) if raw in window.raw] == []
        assert window.raw.count(b"\x1b[2J") == 1  # our own, at the beginning
    said = once(path).stdout
    assert all(line.isprintable() for line in said.splitlines())


def test_it_starts_without_torch(plain: Path) -> None:
    script = (
        "import sys; from attnwatch.monitor.cli import main; "
        f"code = main(['live', {str(plain)!r}, '--once']); print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 False\n"
