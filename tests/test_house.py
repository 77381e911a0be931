"""The house rules that no single file can keep: who imports whom, what is shipped, how long a file is."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnwatch

ROOT = Path(__file__).parent.parent
ROOMS = ("hooks", "monitor", "reports")
FOLDERS = (*ROOMS, "src", "tests", "benchmarks", "docs", ".ci")
BUILT = ("__pycache__", "*.egg-info", "*.pyc")

TOPS = {"monitor/watching.py", "monitor/session.py", "monitor/cli.py", "monitor/demo.py", "monitor/scan.py"}
"""The files of monitor/ that bring the rooms together; so do all of these folders:"""

TOP_FOLDERS = ("monitor/commands/", "monitor/trainers/", "monitor/attach/")

LONGEST = 400
"""Lines. A file that needs more has two subjects."""


def files(*folders: str) -> Iterator[Path]:
    """Every source file in the folders, relative to the root. Links are not followed: each file comes once."""
    for folder in folders:
        for place, below, names in os.walk(ROOT / folder):
            below[:] = [name for name in below if name != "__pycache__" and not name.endswith(".egg-info")]
            yield from ((Path(place) / name).relative_to(ROOT) for name in names if not name.endswith(".pyc"))


def imports(source: str) -> set[str]:
    """Full names of all that a module imports, wherever in it; `from a import b` may mean `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def may_import(path: str, module: str) -> bool:
    """Whether a file (its path from the root) may import a module."""

    def within(*names: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in names)

    if module.startswith(".") or within(*ROOMS):
        return False  # relative, or a room under its bare name, where a trainer's own `hooks.py` would win
    if within("attnwatch.monitor.cli"):
        return path == "src/attnwatch/__main__.py"
    if within("attnwatch.monitor.demo"):
        return path == "monitor/commands/demo.py"
    room = path.split("/")[0]
    if room == "hooks":
        return not within("attnwatch") or within("attnwatch.hooks")
    if room == "reports":
        return not within("torch", "attnwatch.hooks")
    if room == "monitor" and path not in TOPS and not path.startswith(TOP_FOLDERS):
        return not within("torch", "attnwatch.hooks", "attnwatch.reports")
    return True


def test_data_flows_down_and_imports_point_up() -> None:
    """hooks/ knows only torch; of monitor/ and reports/ only the tops know of hooks/ and torch."""
    wrong = [
        f"{path} imports {module}"
        for path in files(*ROOMS, "src")
        if path.suffix == ".py"
        for module in sorted(imports((ROOT / path).read_text()))
        if not may_import(path.as_posix(), module)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("hooks/tap.py", "import torch.nn as nn", True),
        ("hooks/tap.py", "from attnwatch.hooks.sites import Site", True),
        ("hooks/tap.py", "from attnwatch.hooks import sites", True),
        ("hooks/tap.py", "from attnwatch.monitor.sample import Sample", False),
        ("hooks/tap.py", "from attnwatch import monitor", False),
        ("hooks/tap.py", "import attnwatch", False),
        ("hooks/tap.py", "from . import sites", False),
        ("hooks/tap.py", "import hooks.sites", False),
        ("monitor/rules.py", "import numpy, scipy.linalg", True),
        ("monitor/rules.py", "def f():\n    import torch", False),
        ("monitor/rules.py", "from torch.nn import Module", False),
        ("monitor/rules.py", "from attnwatch import hooks", False),
        ("monitor/rules.py", "from attnwatch.reports.html import render", False),
        ("monitor/outputs/log.py", "if TYPE_CHECKING:\n    from attnwatch.hooks.tap import Tap", False),
        ("monitor/session.py", "import torch\nfrom attnwatch.hooks.tap import Tap", True),
        ("monitor/session.py", "from attnwatch.monitor.cli import main", False),
        ("monitor/commands/demo.py", "from attnwatch.monitor import demo", True),
        ("monitor/commands/report.py", "from attnwatch.monitor import demo", False),
        ("monitor/trainers/lightning.py", "import torch\nfrom attnwatch.monitor.session import watch", True),
        ("monitor/demo.py", "from attnwatch.monitor import cli", False),
        ("src/attnwatch/__main__.py", "from attnwatch.monitor.cli import main", True),
        ("reports/html.py", "from attnwatch.monitor.run import Run", True),
        ("reports/html.py", "import torch", False),
        ("reports/html.py", "from attnwatch.hooks.spectrum import METRICS", False),
    ],
)
def test_the_arrows_are_seen(path: str, source: str, allowed: bool) -> None:
    """The check above can fail, for every arrow it holds."""
    assert all(may_import(path, module) for module in imports(source)) == allowed


@pytest.mark.parametrize(
    "code", ["", "attnwatch.open_run; attnwatch.Rule; attnwatch.Alert", "import attnwatch.reports.html"]
)
def test_no_torch_is_loaded_before_it_is_needed(code: str, tmp_path: Path) -> None:
    """`attnwatch report` starts at once, and no room takes a name of the trainer's own modules."""
    code = f"import sys, attnwatch\n{code}\nprint(sorted({{'torch', *{ROOMS}}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_the_rooms_are_not_top_level_modules() -> None:
    assert not set(ROOMS) & set(sys.modules)


def test_every_public_name_is_there() -> None:
    assert [name for name in attnwatch.__all__ if getattr(attnwatch, name).__name__ != name] == []
    assert set(attnwatch.__all__) <= set(dir(attnwatch))


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_linked_into_the_package(room: str) -> None:
    assert os.readlink(ROOT / "src" / "attnwatch" / room) == f"../../{room}"


def test_every_package_is_listed() -> None:
    """A package that pyproject.toml does not list is not in the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {path.parent for path in files(*ROOMS) if path.suffix == ".py"}
    assert sorted(listed) == ["attnwatch", *sorted(".".join(("attnwatch", *path.parts)) for path in found)]


def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    """Also the rules, the pages and the mark that says the package is typed; nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    for folder in (*ROOMS, "src"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns(*BUILT))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*build, "-w", tmp_path, source], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    rooms = {f"attnwatch/{path.as_posix()}" for path in files(*ROOMS)}
    top = {path.relative_to("src").as_posix() for path in files("src")}
    assert shipped == rooms | top
    assert {"attnwatch/py.typed", "attnwatch/monitor/default_rules.toml", "attnwatch/reports/page.html"} <= shipped


def test_no_file_names_a_place_of_one_machine() -> None:
    private = re.compile(rb"(?<![\w.])/(work|root|home)/")
    own = [Path(path.name) for path in ROOT.iterdir() if path.is_file()]
    assert [str(path) for path in (*files(*FOLDERS), *own) if private.search((ROOT / path).read_bytes())] == []


def test_files_are_of_one_subject() -> None:
    lengths = {
        str(path): (ROOT / path).read_bytes().count(b"\n")
        for path in files(*FOLDERS)
        if path.suffix in (".py", ".html", ".toml", ".md")
    }
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}
