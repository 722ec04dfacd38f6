"""Local SGD and DiLoCo: ranks that train by themselves, and are one model when it matters."""

from __future__ import annotations

import pytest

from lockstep.testing import run_ranks
from tests.distributed import low_precision as jobs

pytestmark = pytest.mark.ranks(3)


@pytest.mark.parametrize("exchange", ["local-sgd", "diloco"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 7)])
def test_ranks_end_as_one_and_twice_alike(exchange: str, ranks: int, replicas: int) -> None:
    settings = {"exchange": exchange, "sync_every": 4, "replicas": replicas}
    first, second = (run_ranks(jobs.train_local, ranks, settings) for _ in range(2))
    assert first == second
    assert all(one == first[0] for one in first)
    _digest, exactness, whole = first[0]
    assert exactness == "approximate"
    # Five batches an epoch: ranks meet in the fourth, and at its end.
    assert whole == [False, False, False, True, False] * 3
