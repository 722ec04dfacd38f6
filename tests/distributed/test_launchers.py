"""One script, one digest, whoever starts it (A6)."""

from __future__ import annotations

import pytest

from lockstep import launch
from tests.conftest import Lockstep
from tests.distributed import jobs
from tests.distributed.small import digest_of

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
def test_lockstep_run(lockstep: Lockstep, expected: str, start: str) -> None:
    done = lockstep("run", "-n", "2", "--start", start, "train.py")
    assert digest_of(done.out) == expected


def test_torchrun(lockstep: Lockstep, expected: str) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert digest_of(lockstep.python(*words).out) == expected


@pytest.mark.wide
@pytest.mark.parametrize("flags", [("--use-env",), ()])
def test_what_came_before_torchrun(lockstep: Lockstep, expected: str, flags: tuple[str]) -> None:
    """Without the flag, each rank gets `--local-rank=K`: a script that reads no arguments does not mind."""
    words = ("-m", "torch.distributed.launch", *flags, "--standalone", "--nproc_per_node=2")
    assert digest_of(lockstep.python(*words, "train.py").out) == expected


@pytest.mark.wide
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
