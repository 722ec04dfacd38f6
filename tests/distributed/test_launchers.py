"""One script, one digest, whoever starts it (A6)."""

from __future__ import annotations

import re

import pytest

from lockstep import launch
from tests.conftest import Lockstep
from tests.distributed import jobs

pytestmark = pytest.mark.ranks(4)

SCRIPT = """
import torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def main():
    with lockstep.Run("small", replicas=4) as run:
        model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
        for epoch in run.epochs(2):
            for x, y in run.loader(data, batch_size=8, shuffle=True):
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""


def digest_of(text: str) -> str:
    found = re.findall(
        r"^lockstep: finished steps=8 seconds=[\d.]+ digest=(sha256:[0-9a-f]{64})$",
        text,
        re.MULTILINE,
    )
    assert len(found) == 1, text
    return str(found[0])


@pytest.fixture
def expected(lockstep: Lockstep) -> str:
    lockstep.script(SCRIPT)
    return digest_of(lockstep.python("train.py").out)


@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
def test_lockstep_run(lockstep: Lockstep, expected: str, start: str) -> None:
    done = lockstep("run", "-n", "2", "--start", start, "train.py")
    assert digest_of(done.out) == expected


def test_torchrun(lockstep: Lockstep, expected: str) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py")
    assert digest_of(lockstep.python(*words).out) == expected


def test_spawn_with_the_variables_of_env(lockstep: Lockstep, expected: str) -> None:
    lockstep.script(
        """
import os, socket, sys
import torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import train
    train.main()

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
""",
        "spawned.py",
    )
    assert digest_of(lockstep.python("spawned.py").out) == expected


def test_a_process_group_that_the_script_has_made(lockstep: Lockstep, expected: str) -> None:
    lockstep.script(
        """
import torch.distributed as dist
dist.init_process_group("gloo")
import train
train.main()
assert dist.is_initialized()
dist.destroy_process_group()
""",
        "own_group.py",
    )
    assert digest_of(lockstep("run", "-n", "2", "own_group.py").out) == expected


def test_launch_from_python(tmp_path: object) -> None:
    expected = launch(jobs.train_even, 1, args=({"replicas": 4},), run_dir=f"{tmp_path}/one")
    digests = launch(jobs.train_even, 4, args=({"replicas": 4},), run_dir=f"{tmp_path}/four")
    assert digests == expected * 4
