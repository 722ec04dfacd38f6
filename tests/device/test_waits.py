"""Waits of the source, each left out of a copy of it: the lazy device changes the digest or fails."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import lockstep as package
from tests.device.conftest import SCRIPT

SOURCE = Path(package.__file__).parent
WAITS = [
    ("engine/exchange/tree.py", "pending.work.wait()", ("--exchange", "tree")),
    ("engine/exchange/tree.py", "item.work.wait()", ("--exchange", "tree")),
    ("engine/exchange/scatter.py", "self._work.wait()", ("--strategy", "fsdp")),
    ("world/accelerator.py", "self._stream.wait_stream(", ("--exchange", "tree")),
]


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("file", "line", "words"), WAITS, ids=[wait[1] for wait in WAITS])
def test_a_wait_that_is_left_out(
    lockstep, simulated, on_cpu, tmp_path, file: str, line: str, words
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(SOURCE, copy / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "lockstep" / file).read_text()
    changed, count = re.subn(rf"^( +){re.escape(line)}.*$", r"\1pass", text, flags=re.MULTILINE)
    assert count == 1
    environ = {"PYTHONPATH": f"{copy}:{simulated}", "SIM_LAZY": "1", "EXPECTED": "sim"}
    command = ("run", "-n", "2", *words, lockstep.script(SCRIPT))
    assert on_cpu in lockstep(*command, env=environ, timeout=200).out
    (copy / "lockstep" / file).write_text(changed)
    done = lockstep(*command, env=environ, timeout=200)
    assert on_cpu not in done.out, "the wait is not needed, or the device does not find it"
