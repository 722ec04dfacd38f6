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


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("replicas", [5, 3])
def test_metrics_of_any_size_on_ranks_of_unequal_load(replicas: int) -> None:
    assert_same(jobs.measure_by_size, [1, 2, 3], replicas, replicas=replicas)


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


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["shared-memory", "tree"])
def test_one_loss_through_two_models(exchange: str) -> None:
    assert_same(jobs.train_two_models, [1, 2, 4], exchange, replicas=4)


def test_buffers_that_a_method_changes_before_forward() -> None:
    assert_same(jobs.train_codebook, [1, 2, 4], replicas=4)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["shared-memory", "tree", "native"])
def test_a_loader_that_one_rank_iterates_over_alone_is_named(exchange: str) -> None:
    with pytest.raises(RankError, match=r"MismatchError: rank.* comput.* gradients of .* batch"):
        run_ranks(jobs.main_iterates_alone, 2, exchange, timeout=30)


def test_replicas_with_different_models_are_named() -> None:
    with pytest.raises(RankError, match=r"died with exit code 1|computes gradients of the run's"):
        run_ranks(jobs.different_models, 2, timeout=30)


def test_a_slow_rank_is_waited_for() -> None:
    assert len(set(run_ranks(jobs.slow_tail, 2, timeout=30))) == 1


def test_counting_microbatches_is_refused_where_it_shows() -> None:
    with pytest.raises(RankError, match="StepError: a loop was left between the replicas"):
        run_ranks(jobs.count_microbatches, 1, environ={"LOCKSTEP_AUDIT": "off"})


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_freezing_later_is_refused_on_every_layout(ranks: int) -> None:
    with pytest.raises(RankError, match="ModelError: Sequential has 2 trainable parameters"):
        run_ranks(jobs.freeze_later, ranks)


def test_a_model_stays_what_it_is() -> None:
    expected = (
        2,
        ["", "0", "1"],
        ["0.weight", "0.bias", "1.weight", "1.bias"],
        "Sequential",
        3,
        "kept",
        True,
    )
    for ranks in (1, 2):
        assert run_ranks(jobs.look_like_the_module, ranks) == [expected] * ranks
