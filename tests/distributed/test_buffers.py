"""Buffers start from those of rank 0, whatever their types and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.engine.strategies.buffers import broadcast
from lockstep.testing import run_ranks
from tests.distributed.jobs import quiet_run


@pytest.mark.ranks(2)
def test_tensors_of_several_kinds_come_from_rank_0() -> None:
    first, second = run_ranks(broadcast_kinds, 2)
    assert first == second == [[0.0, 0.0], 0, [False], [], [[0j, 0j]]]


def broadcast_kinds() -> list[Any]:
    with quiet_run() as run:
        rank = run.world.rank
        tensors = [
            torch.full((2,), float(rank)),
            torch.tensor(rank),
            torch.tensor([bool(rank)]),
            torch.zeros(0),
            torch.full((2, 1), complex(rank, rank)).t(),
        ]
        assert dist.group.WORLD is not None
        broadcast(tensors, dist.group.WORLD)
        return [tensor.tolist() for tensor in tensors]
