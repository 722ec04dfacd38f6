"""Waits of the source, each left out of a copy of it: the lazy device changes the digest or fails."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import lockstep as package
from tests.device.conftest import SCRIPT
from tests.device.test_simulated import run

SOURCE = Path(package.__file__).parent
WAITS = [
    ("engine/exchange/tree.py", "pending.work.wait()", ("--exchange", "tree")),
    ("engine/exchange/tree.py", "item.work.wait()", ("--exchange", "tree")),
    ("engine/exchange/scatter.py", "self._work.wait()", ("--strategy", "fsdp")),
    ("world/accelerator.py", "self._stream.wait_stream(", ("--exchange", "tree")),
]
#: Prints whether a checkpoint that is written right after an update has the CPU's bits. The state is on the
#: second device: DCP waits for the current stream of the thread that writes, which is the first device's.
CHECKPOINT = """
import tempfile
from pathlib import Path
from lockstep.state.checkpoint import dcp
from lockstep.state.checkpoint.catalog import Catalog
from lockstep.state.checkpoint.manager import CheckpointManager

def updated(device):
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(300, 100).to(device), torch.randn(8, 300).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    momentum = {f"momentum {i}": s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())}
    return {**model.state_dict(), **momentum}

expected, state = updated("cpu"), updated("sim:1")
catalog = Catalog(Path(tempfile.mkdtemp()) / "checkpoints", {})
manager = CheckpointManager(catalog, rank=0, size=1, store=None, keep=1)
manager.prepare(state)
manager.wait()
manager.save(2, state, "{}", best=None)
manager.wait()
found = catalog.newest()
read = dcp.stored(found.path, found.manifest)
print([torch.equal(read[name].read(), value) for name, value in expected.items()])
manager.close()
"""


def copy_without(directory: Path, file: str, line: str) -> Path:
    """Return a copy of the source in which `pass` replaces the line that begins so."""
    shutil.copytree(SOURCE, directory / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    text = (directory / "lockstep" / file).read_text()
    changed, count = re.subn(rf"^( +){re.escape(line)}.*$", r"\1pass", text, flags=re.MULTILINE)
    assert count == 1
    (directory / "lockstep" / file).write_text(changed)
    return directory


def test_a_checkpoint_waits_for_its_copies(lockstep, simulated, tmp_path) -> None:
    assert run(lockstep, simulated, CHECKPOINT) == str([True] * 4)
    file, line = "state/checkpoint/manager.py", "accelerator.module().synchronize(device)"
    copy = copy_without(tmp_path / "copy", file, line)
    assert run(lockstep, f"{copy}:{simulated}", CHECKPOINT) == str([False] * 4)


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("file", "line", "words"), WAITS, ids=[wait[1] for wait in WAITS])
def test_a_wait_that_is_left_out(
    lockstep, simulated, on_cpu, tmp_path, file: str, line: str, words
) -> None:
    environ = {"PYTHONPATH": simulated, "SIM_LAZY": "1", "EXPECTED": "sim"}
    command = ("run", "-n", "2", *words, lockstep.script(SCRIPT))
    assert on_cpu in lockstep(*command, env=environ, timeout=200).out
    environ["PYTHONPATH"] = f"{copy_without(tmp_path / 'copy', file, line)}:{simulated}"
    done = lockstep(*command, env=environ, timeout=200)
    assert on_cpu not in done.out, "the wait is not needed, or the device does not find it"
