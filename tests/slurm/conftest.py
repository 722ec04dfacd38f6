"""A Slurm cluster for the tests of this directory, and its commands."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests import slurm_cluster
from tests.conftest import Done, Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.template import Template

#: In one piece: several tasks write to one pipe.
WHO = """
import dataclasses, json, os, lockstep
os.write(1, (json.dumps(dataclasses.asdict(lockstep.detect())) + chr(10)).encode())
"""


class Slurm:
    """Commands of Slurm, run in a test's directory."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.directory = lockstep.directory

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command and return at once."""
        return subprocess.Popen(
            words,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def finish(process: subprocess.Popen[str], timeout: float = 60) -> Done:
        """Wait for a command's end."""
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"no end after {timeout} s\n--- out\n{out}\n--- err\n{err}")
        return Done(process.returncode, out, err)

    def __call__(self, *words: str, timeout: float = 60) -> Done:
        """Run a command to its end."""
        return self.finish(self.start(*words), timeout)

    def python(self, *options: str, script: str = "train.py") -> subprocess.Popen[str]:
        """Start `srun options python script`."""
        return self.start("srun", *options, sys.executable, script)

    def who(self, *options: str) -> list[dict[str, Any]]:
        """Return the worlds that the tasks of `srun options` detect, by rank."""
        (self.directory / "who.py").write_text(WHO)
        done = self.finish(self.python(*options, script="who.py"))
        assert done.code == 0, done.err
        worlds = [json.loads(line) for line in done.out.splitlines()]
        return sorted(worlds, key=lambda world: int(world["rank"]))

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until none is left."""
        deadline = time.monotonic() + 30
        while jobs := self("squeue", "--noheader", "--format=%A").out.split():
            self("scancel", *jobs)
            assert time.monotonic() < deadline, f"jobs that cannot be cancelled: {jobs}"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The cluster: two nodes, `n1` and `n2`, that are one machine."""
    missing = slurm_cluster.missing()
    if missing is not None:
        pytest.skip(missing)
    with slurm_cluster.running() as variables:
        yield variables


@pytest.fixture(scope="session")
def digest_of_python(template: Template, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the small script in one process."""
    alone = Lockstep(tmp_path_factory.mktemp("python"), template)
    return digest_of(alone.python(alone.script(SCRIPT)).out)


@pytest.fixture
def slurm(
    cluster: dict[str, str], lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slurm]:
    """The cluster's commands, from outside of any job; jobs end with the test."""
    for name in slurm_cluster.variables_of_slurm():
        monkeypatch.delenv(name)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    commands = Slurm(lockstep)
    yield commands
    commands.cancel_all()
