"""`attnwatch run`: a script is watched, and cannot tell the difference."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.attaching import SCRIPT, Shell

from attnwatch import open_run
from attnwatch.monitor.attach.launched import say

ASKS = '''\
"""A script that says how it was started."""
import json, os, pickle, sys

class Kept:
    pass

if __name__ == "__main__":
    main = sys.modules["__main__"]
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "name": __name__, "spec": main.__spec__ and main.__spec__.name,
        "own": main.__dict__ is globals(), "path": sys.path[0], "doc": __doc__, "optimized": sys.flags.optimize,
        "pickled": type(pickle.loads(pickle.dumps(Kept()))) is Kept, "environment": dict(os.environ),
        "loaded": sorted({"torch", "numpy"} & set(sys.modules)),
    }))
    sys.exit(int(sys.argv[-1]))
'''

SPAWNS = """\
import torch, sys
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        import os
        return torch.tensor([row, "ATTNWATCH_RUN" in os.environ, "attnwatch" in sys.modules])

if __name__ == "__main__":
    rows = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print(torch.cat(list(rows)).tolist())
"""

RUNS = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

FORKS = """\
import os, runpy, sys

if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
sys.argv = [sys.argv[1], "plain", sys.argv[2], "3"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    os._exit(0)
"""


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("r"))


def asked(command: list[object], folder: Path, environment: dict[str, str], code: int) -> dict[str, Any]:
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ([], ["asks.py"]), (["-O"], ["./asks.py"]), ([], ["--", "-asks.py"]), ([], ["-m", "asks"]),
        (["-W", "ignore", "-u"], ["-m", "package"]),
    ],
)  # fmt: skip
def test_a_script_starts_as_python_starts_it(flags: list[str], start: list[str], shell: Shell, tmp_path: Path) -> None:
    """Arguments (also such as ours), `__main__`, paths, environment, exit code; a class of the script can be pickled.
    Nothing is loaded."""
    (tmp_path / "package").mkdir()
    for path in ("asks.py", "-asks.py", "package/__main__.py"):
        (tmp_path / path).write_text(ASKS)
    environment = {**shell.environment, "PYTHONPATH": str(tmp_path / "elsewhere")}
    rest = [*start, "--", "--every", "3", "--r", "-m", "x", "--", "7"]
    alone = asked([sys.executable, *flags, *rest], tmp_path, environment, code=7)
    watched = asked(
        [sys.executable, *flags, "-m", "attnwatch", "run", "--every", "5", *rest], tmp_path, environment, code=7
    )
    assert watched == alone
    assert (alone["own"], alone["pickled"], alone["loaded"]) == (True, True, [])


def test_the_installed_command_starts_scripts_too(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    done = shell.run("run", "asks.py", "0", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["argv"]) == (0, ["asks.py", "0"])
    assert done.stderr == "attnwatch: nothing was watched: no optimizer took a step\n"
    assert not (tmp_path / "runs").exists()


def test_the_sitecustomize_of_the_machine_is_loaded(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = True")
    (tmp_path / "script.py").write_text("import sitecustomize; print(customized, sitecustomize.__file__)")
    environment = {**shell.environment, "PYTHONPATH": str(tmp_path)}
    done = shell.run("run", tmp_path / "script.py", env=environment)
    assert done.stdout == f"True {tmp_path / 'sitecustomize.py'}\n"


TRAINS = f"""\
import sys; sys.path.append({str(SCRIPT.parent)!r})
from pathlib import Path
from trainees import begin
folder = Path(sys.argv[1]); folder.mkdir(); begin(*sys.argv[2:3], folder, int(sys.argv[3]))
"""


def trains(shell: Shell, tmp_path: Path, before: str, steps: int = 3) -> subprocess.CompletedProcess[str]:
    """A script in a folder of its own that does something and then trains, into tmp_path/watched and tmp_path/run."""
    (tmp_path / "own").mkdir(exist_ok=True)
    (tmp_path / "own" / "script.py").write_text(f"{before}\n{TRAINS}")
    options = ["--run", tmp_path / "run", "--every", 1, tmp_path / "own" / "script.py"]
    return shell.run("run", *options, tmp_path / "watched", "plain", steps)


def test_a_script_may_ask_for_torch_first_and_have_modules_of_our_names(shell: Shell, tmp_path: Path) -> None:
    """Libraries look whether torch is installed before they load it. The script's own modules are the ones it gets."""
    (tmp_path / "own").mkdir()
    names = ("monitor", "hooks", "reports", "sitecustomize")
    for name in names:
        (tmp_path / "own" / f"{name}.py").write_text("own = True")
    asks = f"import importlib.util, {', '.join(names)}\nassert importlib.util.find_spec('torch')\n"
    done = trains(shell, tmp_path, asks + "\n".join(f"assert {name}.own" for name in names))
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "run").steps.tolist() == [1, 2]


def test_a_library_of_ours_that_the_script_hides_is_named_and_the_script_goes_on(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "jinja2.py").write_text("")
    done = trains(shell, tmp_path, "")
    assert (done.returncode, (tmp_path / "watched" / "losses").read_text().count("\n")) == (0, 3)
    assert done.stderr.startswith("attnwatch: nothing is watched: ImportError: cannot import name")
    assert done.stderr.count("\n") == 1


def test_a_script_whose_reader_has_left_is_watched_all_the_same(shell: Shell, tmp_path: Path) -> None:
    """Lines of ours are lost then, and nothing is raised."""
    done = trains(shell, tmp_path, "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 2)")
    assert (done.returncode, done.stdout) == (0, "")
    assert open_run(tmp_path / "run").steps.tolist() == [1, 2]
    assert open_run(tmp_path / "run").ended


def test_a_script_without_a_standard_error_hears_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    for nothing in (None, closed):
        monkeypatch.setattr(sys, "stderr", nothing)
        say("a line")
    assert capsys.readouterr().out == ""


def test_what_a_forked_copy_of_the_script_trains_is_not_recorded(shell: Shell, tmp_path: Path) -> None:
    """Neither into the run of the script itself nor into one of its own; it may be forked before or after the first
    step."""
    after = """
import os
from trainees import Decoder
import torch
model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 5, dtype=torch.int64)).backward()
        optimizer.step()
def train_in_a_copy(steps):
    child = os.fork()
    if child == 0:
        train(steps)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
train_in_a_copy(4)
train(3)
train_in_a_copy(5)
train(2)
"""
    (tmp_path / "script.py").write_text(TRAINS.splitlines()[0] + after)
    done = shell.run("run", "--run", tmp_path / "run", "--every", 1, tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "run").scalar("loss")[0].tolist() == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "script.py"]


def test_workers_that_are_spawned_find_the_scripts_classes(shell: Shell, tmp_path: Path) -> None:
    """They start as without us: nothing of ours is in them."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = shell.run("run", "spawns.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{[[row, 0, 0] for row in range(4)]}\n"), done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_reaches_the_script_and_what_was_recorded_is_kept(name: str, shell: Shell, tmp_path: Path) -> None:
    """Python itself ends by SIGINT after a KeyboardInterrupt, when it has done what is to be done at the end."""
    number = signal.Signals[name]
    folder = tmp_path / "watched"
    folder.mkdir()
    command = ["-m", "attnwatch", "run", "--run", tmp_path / "run", "--every", 1, SCRIPT, "plain", folder]
    process = shell.start(*command)
    losses = folder / "losses"
    while not losses.exists() or losses.read_text().count("\n") < 6:
        assert process.poll() is None, process.communicate()[0]
    process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == -number
    assert said.startswith(f"attnwatch: watching Decoder from step 1 on, every 1 steps, in {tmp_path / 'run'}\n")
    assert open_run(tmp_path / "run").ended == (name == "SIGINT")
    assert open_run(tmp_path / "run").steps.tolist()[:4] == [1, 2, 3, 4]


def test_of_several_ranks_the_first_is_watched(shell: Shell, tmp_path: Path) -> None:
    """As torchrun starts them."""
    (tmp_path / "ranks.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "from pathlib import Path\nfrom torch import distributed\nfrom trainees import begin\n"
        "distributed.init_process_group('gloo')\n"
        "folder = Path(os.environ['RANK']); folder.mkdir(); begin('plain', folder, 5)\n"
        "distributed.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "attnwatch", "run", "-o", "run", "--every", "2", "ranks.py"]
    done = subprocess.run(command, cwd=tmp_path, env=shell.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("attnwatch: ")]
    run = tmp_path / "run" / "rank00000"
    assert told == [
        "attnwatch: rank 0 of 2 is watched: its share of the batch",
        f"attnwatch: watching Decoder from step 1 on, every 2 steps, in {run}",
        f"attnwatch: Decoder was watched up to step 4, 0 alerts fired: {run / 'report.html'}",
    ]
    assert open_run(run).steps.tolist() == [1, 3]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rank00000"]
    assert [(tmp_path / rank / "losses").read_text().count("\n") for rank in "01"] == [5, 5]
    assert not (tmp_path / "run-2").exists()


def test_wrong_use_is_one_line_before_the_script_starts(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("print('started')")
    place = "expected a place for .*, found .*asks.py, which is no directory"
    assert re.search(place, shell.refuses("run", "-o", "asks.py/x/run", "asks.py", cwd=tmp_path))
    assert "expected a port from 0 to 65535" in shell.refuses("run", "--prometheus", "65536", "asks.py", cwd=tmp_path)
    for options in (["--every", "0"], ["--rules", "no.toml"], ["--run", ""], ["--compiled", "no"]):
        shell.refuses("run", *options, "asks.py", cwd=tmp_path)
    deaf = [sys.executable, "-E", "-m", "attnwatch", "run", "asks.py"]
    done = subprocess.run(deaf, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "found -E, -I or -S" in done.stderr


@pytest.mark.parametrize("words", [["-um", "attnwatch"], ["-umattnwatch"], ["-u", "-mattnwatch"]])
def test_flags_in_one_word_with_the_module_are_kept_without_it(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("import json, sys; print(json.dumps(sys.orig_argv[1:]))")
    command = [sys.executable, "-B", *words, "run", "says.py", "-u"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(done.stdout) == ["-B", "-u", "says.py", "-u"]


def test_forked_processes_that_load_torch_first_are_not_watched(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    done = shell.run("run", "-o", "run", "forks.py", SCRIPT, tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "attnwatch: nothing was watched: no optimizer took a step\n")
    assert (tmp_path / "losses").read_text().count("\n") == 3
    assert not (tmp_path / "run").exists()


def test_what_could_not_be_watched_is_named_again_at_the_end(shell: Shell, tmp_path: Path) -> None:
    """Here the place of the run is taken by a file after the start."""
    (tmp_path / "blocks.py").write_text(f"open('place', 'w').close()\n{RUNS}")
    done = shell.run("run", "-o", "place/run", "blocks.py", SCRIPT, "plain", tmp_path, "2", cwd=tmp_path)
    first, last = done.stderr.splitlines()
    assert first.startswith("attnwatch: Decoder is not watched: expected a new or empty directory")
    assert last == first.replace("Decoder", "nothing was watched: Decoder")
    assert done.returncode == 0


def test_a_script_without_attention_is_named_at_its_end(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    done = shell.run("run", SCRIPT, "without_attention", folder, "3", cwd=tmp_path)
    found = "0  Linear: 20 parameters, no attention, trained by SGD"
    assert (
        done.stderr == f"attnwatch: nothing was watched: expected a model with attention in training, found {found}\n"
    )
    assert (done.returncode, os.listdir(tmp_path)) == (0, ["watched"])
    left = json.loads((folder / "left.json").read_text())
    assert (left["forward_hooks"], left["optimizer_hooks"], left["backward"]) == (0, 1, True)
