"""What an heir imports, and what makes it unfit: in a process of its own each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch import warm

MODULES = {
    "clean": "VALUE = 1",
    "loud": "import os; print('loud'); os.write(2, b'loud')",
    "broken": "raise RuntimeError('no')",
    "leaving": "raise SystemExit(3)",
    "main_only": "import signal; signal.signal(signal.SIGUSR1, print)",
    "threads": "from threading import Event, Thread; Thread(target=Event().wait, daemon=True).start()",
    "children": "import subprocess; child = subprocess.Popen(['sleep', '100'])",
    "sockets": "import socket; kept = socket.socket()",
    "files": "kept = open(__file__)",
}

CODE = """
import json, os, sys
from lockstep.launch import warm
sys.path.insert(0, {directory!r})
before = os.getpriority(os.PRIO_PROCESS, 0)
problem = warm.import_all({modules!r})
assert os.getpriority(os.PRIO_PROCESS, 0) == before
children = sys.modules.get("children")
if children is not None:
    warm.end_children()
    assert children.child.wait() == -9
names = [name for name in {names!r} if name in sys.modules]
json.dump([problem, names], sys.stdout)
"""


def imported(directory: Path, *names: str, elsewhere: bool = False) -> tuple[str | None, list[str]]:
    """Return the package that stopped the import of `names`, and which of them are there after it."""
    for name in names:
        (directory / f"{name}.py").write_text(MODULES[name])
    place = directory / "elsewhere" if elsewhere else directory
    modules = [(name, str(place / f"{name}.py")) for name in names]
    code = CODE.format(directory=str(directory), modules=modules, names=list(names))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    problem, found = json.loads(done.stdout)
    return problem, found


def test_harmless_modules_are_imported_in_silence(tmp_path):
    names = ("clean", "loud", "broken", "main_only", "files")
    assert imported(tmp_path, *names) == (None, ["clean", "loud", "files"])


@pytest.mark.parametrize("name", ["threads", "children", "sockets"])
def test_a_module_that_no_fork_goes_with_stops_it(tmp_path, name):
    assert imported(tmp_path, name, "clean") == (name, [name])


def test_a_module_that_ends_the_process_does_not(tmp_path):
    assert imported(tmp_path, "clean", "leaving") == (None, ["clean"])


def test_a_name_that_means_another_file_is_left_alone(tmp_path):
    assert imported(tmp_path, "clean", elsewhere=True) == (None, [])


def test_modules_of_the_user_are_not_told():
    found = dict(warm.imported(set()))
    assert "json.decoder" in found
    assert "lockstep.launch.warm" in found
    assert __name__ not in found
    assert "__main__" not in found
    assert "json" not in dict(warm.imported({"json"}))


def test_what_is_wanted():
    modules = [("numpy", "a"), ("numpy.core", "b"), ("scipy", "c")]
    assert warm.wanted(modules, set()) == modules
    assert warm.wanted(modules, {"numpy"}) == [("scipy", "c")]
    assert warm.wanted([*modules, ("mpi4py.MPI", "d")], set()) == []
