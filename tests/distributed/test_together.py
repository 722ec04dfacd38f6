"""What ranks do together besides training."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.testing import RankError, RankTimeoutError, assert_same, run_ranks
from tests.distributed import jobs

pytestmark = pytest.mark.ranks(3)


def test_the_main_rank_goes_first(tmp_path: Path) -> None:
    seen = run_ranks(jobs.take_turns, 3, str(tmp_path))
    assert seen[0] == ["0"]
    assert all(order[0] == "0" for order in seen)


def test_two_runs_in_one_process() -> None:
    first, second = assert_same(jobs.train_twice, [1, 2], replicas=2)
    assert first != second


def test_a_model_without_trainable_parameters() -> None:
    assert_same(jobs.train_frozen, [1, 2, 4], replicas=4)


def test_loops_that_all_ranks_leave_early() -> None:
    assert_same(jobs.train_with_breaks, [1, 3, 4], replicas=4)


def fail_on(rank: int) -> None:
    import os

    if int(os.environ["RANK"]) == rank:
        raise LookupError(f"on rank {rank}")


def sleep() -> None:
    import time

    time.sleep(60)


def test_the_first_exception_comes_back() -> None:
    with pytest.raises(RankError, match=r"rank 1: LookupError: on rank 1") as caught:
        run_ranks(fail_on, 2, 1)
    assert caught.value.rank == 1


def test_a_hard_timeout() -> None:
    with pytest.raises(RankTimeoutError, match=r"rank 0, 1 of 2 still ran after 0\.5 s"):
        run_ranks(sleep, 2, timeout=0.5)
