"""Fixtures of the tests under mpiexec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.hosts import hosts
from tests.mpi.libraries import Mpi, remove_leftovers, shared_files
from tests.template import Template

__all__ = ["hosts"]

SCRIPT = """
import sys
import torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def train(exchange, each_batch=lambda run: None, workers=0):
    with lockstep.Run("small", exchange=exchange) as run:
        model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
        for epoch in run.epochs(2):
            for x, y in run.loader(data, batch_size=8, shuffle=True, num_workers=workers):
                each_batch(run)
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

if __name__ == "__main__":
    for exchange in sys.argv[1:]:
        train(exchange)
"""


def digests_of(text: str) -> list[str]:
    return re.findall(
        r"^lockstep: finished steps=8 .* digest=(sha256:[0-9a-f]{64})$", text, re.MULTILINE
    )


@pytest.fixture(scope="session")
def expected(template: Template, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that plain `python` gives."""
    alone = Lockstep(tmp_path_factory.mktemp("alone"), template)
    done = alone.python(alone.script(SCRIPT), "auto", env={"LOCKSTEP_REPLICAS": "4"})
    (digest,) = digests_of(done.out)
    return digest


@pytest.fixture
def library(lockstep: Lockstep) -> Iterator[Callable[[str], Mpi]]:
    """Give an MPI library by name; skip where it is not installed."""
    before = shared_files()

    def give(name: str) -> Mpi:
        mpi = Mpi(name, lockstep)
        if reason := mpi.missing():
            pytest.skip(reason)
        return mpi

    yield give
    lockstep.close()
    remove_leftovers(before)


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(library: Callable[[str], Mpi], request: pytest.FixtureRequest, tmp_path: Path) -> Mpi:
    """Each MPI library, with the script in its directory."""
    given = library(request.param)
    given.lockstep.script(SCRIPT)
    return given
