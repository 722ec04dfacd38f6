"""The small script, written for a test, and the digest it has to end with."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.template import Template


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> None:
    """Start the process that ranks are forked from."""
    multiprocessing.set_forkserver_preload(["tests.distributed.preload"])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def digest_of_one_process(
    template: Template, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """What the small script ends with, started by plain `python`."""
    command = Lockstep(tmp_path_factory.mktemp("one-process"), template)
    command.script(SCRIPT)
    yield digest_of(command.python("train.py").out)
    command.close()


@pytest.fixture
def expected(lockstep: Lockstep, digest_of_one_process: str) -> str:
    """Write the small script for this test; give the digest it has to end with."""
    lockstep.script(SCRIPT)
    return digest_of_one_process
