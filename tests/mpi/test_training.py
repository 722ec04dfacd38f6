"""`mpiexec -n N python script.py` gives the digest that `python script.py` gives (A4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mpi.conftest import SCRIPT, digests_of
from tests.mpi.libraries import Mpi

pytestmark = pytest.mark.ranks(4)

SUMS = """
import torch
from torch import nn
from lockstep.engine.exchange.base import ExchangeContext, Forest
from lockstep.engine.exchange.choose import make
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, leaves, merges
from lockstep.world import detect
from train import train

world = detect()

def leaf(replica, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * numel + replica)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)

def nodes(replicas, among, values):
    return fold(values, merges(leaves(replicas), among)[0], torch.add)

def check(exchange, replicas, dtype):
    mine, sums, wanted = block(replicas, world.size, world.rank), [], []
    for numel in (1, 7, 10_001):
        values = [leaf(replica, numel, dtype) for replica in range(replicas)]
        wanted += nodes(range(replicas), replicas, values)
        slots = exchange.slots(torch.empty(numel, dtype=dtype))
        for slot, node in zip(slots, nodes(mine, replicas, [values[r] for r in mine]), strict=True):
            slot.copy_(node)
        sums.append(exchange.start(slots, last=numel == 10_001))
    assert all(torch.equal(one.wait(), other) for one, other in zip(sums, wanted, strict=True))

for exchange in ("auto", "mpi"):
    train(exchange)
for replicas in (world.size, 5, 7):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        forest = Forest.of(replicas, world.size, world.rank)
        parameters = [nn.Parameter(torch.zeros(1, dtype=dtype))]
        context = ExchangeContext(
            name="mpi", forest=forest, parameters=parameters, group=None, store=None, key=""
        )
        exchange = make(context)
        for _ in range(2):
            check(exchange, replicas, dtype)
        kind = type(exchange).__name__
        if world.rank == 0:  # mpiexec mixes the lines of several ranks
            print(f"{replicas} {dtype} {kind}")
"""


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("name", "n"), [("mpich", 3), ("openmpi", 2), ("mpich", 4), ("openmpi", 4)]
)
def test_training_and_sums_have_the_bits_of_the_tree(
    library: Callable[[str], Mpi], expected: str, name: str, n: int
) -> None:
    mpi = library(name)
    mpi.lockstep.script(SCRIPT)
    mpi.lockstep.script(SUMS, "sums.py")
    done = mpi(n, "sums.py")
    assert done.code == 0, done
    assert digests_of(done.out) == [expected] * 2, done
    assert f"4 replicas on {n} ranks, cpu, exchange mpi" in done.err
    kinds = {" ".join(line.split()[1:]) for line in done.out.splitlines()}
    assert ("torch.float32 PairExchange" in kinds) == (n == 2)
    assert {"torch.float32 TreeExchange", "torch.bfloat16 TreeExchange"} <= kinds


@pytest.mark.wide
def test_two_jobs_at_once_one_with_parameter_servers(mpi: Mpi, expected: str) -> None:
    servers = {"LOCKSTEP_STRATEGY": "ps", "LOCKSTEP_SERVERS": "2"}  # rank 0 starts them
    jobs = [mpi.start(2, "train.py", "auto", "mpi"), mpi.start(2, "train.py", "auto", **servers)]
    for job, exchange in zip(jobs, ("mpi", "server"), strict=True):
        done = mpi.lockstep.finish(job)
        assert set(digests_of(done.out)) == {expected}, done
        assert f"4 replicas on 2 ranks, cpu, exchange {exchange}" in done.err
        assert done.code == 0
