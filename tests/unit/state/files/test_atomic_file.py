"""What a power loss leaves: files and names that were not brought to the disk are gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from lockstep.state.checkpoint import catalog
from lockstep.state.files import atomic_file, run_file
from tests.conftest import Lockstep


class Disk:
    """Remembers what `os.fsync` brings to the disk, and forgets the rest in a power loss."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[int, int]] = {}
        self._names: dict[int, set[str]] = {}

    def begin(self) -> None:
        """See what this process brings to the disk from here on."""
        os.fsync = self.fsync

    def fsync(self, descriptor: int) -> None:
        """Take the place of `os.fsync`; of torch, as of 2.15, no call comes."""
        if sys._getframe(1).f_globals["__name__"].startswith("torch."):
            return
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            self._names[about.st_ino] = set(os.listdir(descriptor))
        else:
            self._contents[about.st_ino] = about.st_size, about.st_mtime_ns

    def lose_power(self, directory: Path) -> None:
        """Remove names, and empty files, that are in the memory of the system alone."""
        kept = self._names.get(directory.stat().st_ino, set())
        for path in directory.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                self.lose_power(path)
            elif self._contents.get((about := path.stat()).st_ino) != (
                about.st_size,
                about.st_mtime_ns,
            ):
                os.truncate(path, 0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(os, "fsync", os.fsync)  # puts it back after the test
    disk = Disk()
    disk.begin()
    return disk


def test_a_file_is_whole_after_a_power_loss_as_it_was_or_as_it_is(
    disk: Disk, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    atomic_file.atomic_write(first, "old")
    atomic_file.atomic_write(first, "new")
    second.write_text("lost")
    with contextlib.suppress(InterruptedError), atomic_file.replacing(first) as file:
        file.write(b"half")
        raise InterruptedError
    disk.lose_power(tmp_path)
    assert first.read_text() == "new"
    assert not second.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_the_modes_are_those_asked_for_less_the_mask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_file.atomic_write(tmp_path / "all", b"")
        atomic_file.atomic_write(tmp_path / "mine", b"", 0o600)
        atomic_file.make_directory(tmp_path / "above" / "below", 0o700)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"all": 0o640, "mine": 0o600, "above": 0o750, "below": 0o700}


TRAIN = """
import sys, pathlib, torch, lockstep
from tests.unit.state.files.test_atomic_file import Disk

directory, fails = pathlib.Path(sys.argv[0]).parent, {fails}
disk = Disk()
disk.begin()

class Logger:
    def log(self, values, step):
        pass

try:
    with lockstep.Run("one", threads=1, devices="cpu", progress=False, loggers=[Logger()],
                      run_dir=directory / "runs" / "digits" / "one") as run:
        model = run.model(torch.nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train = run.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
        for _ in run.epochs(3):
            for (batch,) in train:
                loss = model(batch).square().mean()
                run.backward(loss)
                optimizer.step()
                run.log(loss=loss)
                print("step", run.step)
            run.save()
            if fails:
                raise InterruptedError
except InterruptedError:
    disk.lose_power(directory / "runs")
"""


@pytest.mark.forked
def test_a_run_continues_after_a_power_loss_from_its_checkpoint(lockstep: Lockstep) -> None:
    """The names above it, the record, and files that DCP has written and not brought to the disk."""
    root = str(Path(__file__).parents[4])

    def train(*, fails: bool) -> str:
        script = lockstep.script(TRAIN.format(fails=fails))
        done = lockstep.python(script, env={"PYTHONPATH": root}, timeout=120)
        assert done.code == 0, done.err
        return done.out

    assert train(fails=True).split("\n") == ["step 1", "step 2", ""]
    (directory,) = lockstep.directory.glob("runs/digits/*")
    recorded = run_file.read(directory)
    assert recorded is not None
    assert recorded["status"] == "failed"
    assert catalog.paths(directory / "checkpoints").keys() == {(2, 0)}
    json.loads((directory / "loggers" / "progress.json").read_text())
    *steps, last, _ = train(fails=False).split("\n")
    # Of the loop that is done its last batch comes again, for what it leaves in variables.
    assert steps == ["step 2", "step 3", "step 4", "step 5", "step 6"]
    assert last.startswith("lockstep: finished steps=6 ")
