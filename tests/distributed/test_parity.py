"""Lockstep does what the loops written by hand do, to the bit, and nothing else."""

from __future__ import annotations

import pytest

from lockstep.testing import run_ranks
from tests.distributed import jobs, plain

pytestmark = pytest.mark.ranks(2)


def test_one_replica_equals_a_plain_loop() -> None:
    assert run_ranks(jobs.train_even, 1, {"replicas": 1}) == run_ranks(plain.plain_single, 1)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["native", "tree", "shared-memory"])
def test_two_replicas_on_two_ranks_equal_plain_ddp(exchange: str) -> None:
    settings = {"replicas": 2, "exchange": exchange}
    assert run_ranks(jobs.train_even, 2, settings) == run_ranks(plain.plain_ddp, 2)


def test_two_replicas_on_one_rank_equal_plain_ddp_on_two() -> None:
    assert run_ranks(jobs.train_even, 1, {"replicas": 2}) == run_ranks(plain.plain_ddp, 2)[:1]
