"""The simulated accelerator, built once for this torch; without a compiler its tests are skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.device.simulated import build
from tests.template import Template

SCRIPT = Path(__file__).with_name("train.py").read_text()
CACHE = Path(__file__).parents[2] / "build" / "device"


def digest_of(done) -> str:
    assert done.code == 0, done.out + done.err
    (found,) = re.findall(r"digest=sha256:(\w+)", done.out)
    return found


@pytest.fixture(scope="session")
def simulated() -> str:
    """Return the directory that goes on PYTHONPATH."""
    if lacks := build.missing():
        pytest.skip(f"the simulated accelerator cannot be built: {lacks}")
    environ = {**os.environ, "MAX_JOBS": "2"}
    words = [sys.executable, build.__file__, str(CACHE)]
    done = subprocess.run(
        words, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def template(simulated: str) -> Iterator[Template]:
    """The process that commands are forked from; it has loaded the simulated accelerator."""
    process = Template(environ={"PYTHONPATH": simulated})
    yield process
    process.close()


@pytest.fixture
def device(lockstep, simulated):
    """Run the script on simulated devices; what it returns is called with words and more variables."""

    def run(*words: str, lazy: bool = True, verb: str = "run", script: str = SCRIPT, **more: str):
        environ = {"PYTHONPATH": simulated, "SIM_LAZY": str(int(lazy)), "EXPECTED": "sim", **more}
        place = lockstep.script(script)
        words = (*words, place) if verb == "run" else (place, *words)
        return lockstep(verb, *words, env=environ, timeout=200)

    return run


@pytest.fixture(scope="session")
def on_cpu(template, tmp_path_factory) -> str:
    """Return the digest of the script on the CPU, whatever accelerator there is."""
    command = Lockstep(tmp_path_factory.mktemp("cpu"), template)
    words = ("run", "-n", "1", "--devices", "cpu", command.script(SCRIPT))
    return digest_of(command(*words, env={"EXPECTED": "cpu"}))
