"""What a fork server imports for its workers, and what it cannot share; each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = {
    "clean": "VALUE = 1",
    "broken": "raise RuntimeError('no')",
    "leaving": "raise SystemExit(3)",
    "files": "kept = open(__file__)",
    "lazy": "def __getattr__(name):\n    import clean\n    return clean",
    "cleans": "import atexit, os; HOME = os.environ.get('HOME'); atexit.register(os.getpid)",
    "mpi4py": "",
}

#: What no fork goes with.
ALONE = {
    "prints": "print('a banner')",
    "writes": "import os; os.write(2, b'a warning')",
    "threads": "from threading import Event, Thread; Thread(target=Event().wait, daemon=True).start()",
    "children": "import subprocess; child = subprocess.Popen(['sleep', '100'])",
    "sockets": "import socket; kept = socket.socket()",
    "handlers": "import signal; signal.signal(signal.SIGUSR1, print)",
    "ranks": "import os; RANK = int(os.environ.get('LOCAL_RANK', 0))",
    "worlds": "import os; SIZE = os.getenv('WORLD_SIZE'); IS_ONE = 'MASTER_PORT' not in os.environ",
    "copies": "import os; BEFORE = os.environ.copy()",
    "directories": "import tempfile; MADE = tempfile.mkdtemp()",
    "backups": "import pathlib, sys, tempfile; MADE = tempfile.mkdtemp(dir=sys.path[0]); "
    "pathlib.Path(MADE, 'users').touch()",
    "devices": "import os; SHOWN = os.environ.get('CUDA_VISIBLE_DEVICES')",
    "interfaces": "import os; HERE = os.environ.get('GLOO_SOCKET_IFNAME', 'eth0')",
    "draws": "import torch; NAME = torch.rand(())",
    "finalizers": "import weakref; weakref.finalize(lambda: 0, print)",
    "over_mpi": "import mpi4py",
}

CODE = """
import json, os, sys
from lockstep.launch.target.imports import Import
from lockstep.launch.target.preload import import_shared
directory, origins, names, taken, skipped = json.loads(sys.argv[1])
sys.path.insert(0, directory)
imports = [Import(name, f"{origins}/{name}.py", tuple(taken)) for name in names]
before = dict(os.environ)
problem = import_shared(imports, "1", skipped)
assert os.environ == before
children = sys.modules.get("children")
assert children is None or children.child.wait() == -9
made = sys.modules.get("directories")
assert made is None or not os.path.exists(made.MADE)
backups = sys.modules.get("backups")
assert backups is None or os.listdir(backups.MADE) == ["users"]
print(json.dumps([problem, [name for name in (*names, "clean") if name in sys.modules]]))
"""


def imported(
    directory: Path,
    *names: str,
    taken: tuple[str, ...] = (),
    skipped: tuple[str, ...] = (),
    elsewhere: bool = False,
) -> tuple[str | None, list[str]]:
    """Return the package that cannot be shared, and which modules are there after it."""
    for name, text in (MODULES | ALONE).items():
        (directory / f"{name}.py").write_text(text)
    place = directory / "elsewhere" if elsewhere else directory
    argument = json.dumps([str(directory), str(place), names, taken, skipped])
    done = subprocess.run(
        [sys.executable, "-c", CODE, argument],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""
    problem, found = json.loads(done.stdout)
    return problem, found


def test_what_can_be_shared(tmp_path: Path) -> None:
    names = ("clean", "broken", "leaving", "files", "cleans")
    assert imported(tmp_path, *names) == (None, ["clean", "files", "cleans", "clean"])


def test_what_is_imported_only_when_it_is_taken(tmp_path: Path) -> None:
    assert imported(tmp_path, "lazy") == (None, ["lazy"])
    assert imported(tmp_path, "lazy", taken=("part",)) == (None, ["lazy", "clean"])


@pytest.mark.parametrize("name", ALONE)
def test_what_no_fork_goes_with_stops_it(tmp_path: Path, name: str) -> None:
    assert imported(tmp_path, name, "clean") == (name, [name])
    assert imported(tmp_path, name, "clean", skipped=(name,)) == (None, ["clean", "clean"])


def test_what_is_never_shared(tmp_path: Path) -> None:
    assert imported(tmp_path, "mpi4py", "clean") == (None, ["clean", "clean"])


def test_a_name_that_means_another_file_is_left_alone(tmp_path: Path) -> None:
    assert imported(tmp_path, "clean", elsewhere=True) == (None, [])
