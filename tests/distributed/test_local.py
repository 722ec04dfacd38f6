"""Local SGD and DiLoCo: ranks that train by themselves, and are one model when it matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.testing import RankError, run_ranks
from tests.distributed import low_precision as jobs

pytestmark = pytest.mark.ranks(3)


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 7)])
def test_ranks_end_as_one_and_twice_alike(strategy: str, ranks: int, replicas: int) -> None:
    settings = {"strategy": strategy, "sync_every": 4, "replicas": replicas}
    first, second = (run_ranks(jobs.train_local, ranks, settings) for _ in range(2))
    assert first == second
    assert all(one == first[0] for one in first)
    _digest, exactness, whole = first[0]
    assert exactness == "approximate"
    # Five batches an epoch: ranks meet in the fourth, and at its end.
    assert whole == [False, False, False, True, False] * 3


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_run_goes_on_as_if_nothing_had_been(strategy: str, tmp_path: Path) -> None:
    """States are taken when ranks are one only; outer and inner momentum come back."""
    environ = {"LOCKSTEP_REPLICAS": "2", "LOCKSTEP_THREADS": "1"}
    place = str(tmp_path / "run")
    faults = {**environ, "LOCKSTEP_FAULTS": "term@10"}
    first = run_ranks(jobs.train_and_stop, 2, place, strategy, 0.02, environ=faults)
    assert first == ["preempted"] * 2
    step = json.loads((tmp_path / "run/run.json").read_text())["step"]
    assert step % 6 in (0, 4), "six batches an epoch: ranks are one in the fourth, and at its end"
    second = run_ranks(jobs.train_and_stop, 2, place, strategy, environ=environ)
    whole = run_ranks(jobs.train_and_stop, 2, str(tmp_path / "whole"), strategy, environ=environ)
    assert second == whole
    assert len(set(whole)) == 1


def test_a_rank_that_leaves_a_loop_by_itself_is_told() -> None:
    with pytest.raises(
        RankError, match=r"MismatchError: since the last average, .* done \[4, 2\] steps of Linear"
    ):
        run_ranks(jobs.leave_alone, 2, "local-sgd", timeout=30)


def test_where_one_model_meets_all_do(tmp_path: Path) -> None:
    """Two models out of phase are whole together all the same: the run can be saved, and ended."""
    environ = {"LOCKSTEP_REPLICAS": "2", "LOCKSTEP_THREADS": "1"}
    whole = run_ranks(jobs.out_of_phase, 2, str(tmp_path / "whole"), environ=environ)
    assert [points for _, points in whole] == [list(range(4, 61, 4))] * 2
    place = str(tmp_path / "run")
    faults = {**environ, "LOCKSTEP_FAULTS": "term@8"}
    first = run_ranks(jobs.out_of_phase, 2, place, 0.02, environ=faults)
    assert [digest for digest, _ in first] == ["preempted"] * 2
    second = run_ranks(jobs.out_of_phase, 2, place, environ=environ)
    assert [digest for digest, _ in second] == [digest for digest, _ in whole]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_barrier_is_no_meeting(strategy: str) -> None:
    settings = {"strategy": strategy, "sync_every": 4}
    seldom, often = (run_ranks(jobs.with_barriers, 2, settings, one) for one in (False, True))
    assert seldom == often


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 3), (3, 7)])
def test_ranks_weigh_their_samples(ranks: int, replicas: int) -> None:
    """Plain SGD that meets in every step is SGD on all samples, however they are split over ranks."""
    settings = {"exact": False, "replicas": replicas}
    expected = run_ranks(jobs.by_samples, 1, settings)[0]
    local = {**settings, "strategy": "local-sgd", "sync_every": 1}
    for reached in run_ranks(jobs.by_samples, ranks, local):
        assert reached == pytest.approx(expected, abs=1e-5)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_weights_that_nobody_has_moved_keep_their_bits(strategy: str) -> None:
    """Whatever ranks weigh: a weighted mean of equal numbers may be another one."""
    settings = {"strategy": strategy, "sync_every": 3, "replicas": 7}
    for _digest, same in run_ranks(jobs.train_unused, 3, settings, 10):
        assert same


def test_what_ranks_tell_each_other() -> None:
    for told in run_ranks(jobs.differing_memory, 3, 2):
        assert told[::2] == [[([rank, 5], {"same": [1, None, "é"]}) for rank in range(3)]] * 2
        assert told[1::2] == [[([7], ["x"] * (3 * rank)) for rank in range(3)]] * 2


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_keywords_that_ask_for_other_results(name: str) -> None:
    with pytest.raises(RankError, match=f"ModelError: {name}=False with strategy=local-sgd"):
        run_ranks(jobs.with_keywords, 2, "local-sgd", {name: False})


def test_optimizers_whose_steps_cannot_be_counted() -> None:
    with pytest.raises(RankError, match="ModelError: Sequential has two optimizers"):
        run_ranks(jobs.two_optimizers, 2)
    with pytest.raises(RankError, match=r"ModelError: optimizer 1 .* holds parameters of 2 models"):
        run_ranks(jobs.one_optimizer_for_two_models, 2)


def test_fp16_is_refused() -> None:
    with pytest.raises(RankError, match="UsageError: precision=fp16 with strategy=diloco"):
        run_ranks(jobs.overflow, 2, {"strategy": "diloco", "exact": False})


@pytest.fixture(scope="module")
def expected() -> float:
    """What one process comes to."""
    return float(run_ranks(jobs.accuracy, 1, {})[0][0])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("asked", "training"),
    [
        ({"exchange": "bf16"}, ()),
        ({"exchange": "fp16"}, ()),
        ({"exchange": "powersgd"}, ()),
        ({"strategy": "local-sgd"}, ()),
        # Its outer momentum makes large steps of small ones: it wants a smaller rate, and more epochs.
        ({"strategy": "diloco"}, (0.03, 12)),
    ],
)
def test_the_digits_are_learnt_as_well(
    asked: dict[str, str], training: tuple[Any, ...], expected: float
) -> None:
    """Within 3 percentage points of the exact exchange, which gets more than 90 % of the scans right."""
    settings = {**asked, "exact": False}
    (reached, digest), other = run_ranks(jobs.accuracy, 2, settings, *training)
    assert other == (reached, digest)
    assert expected > 0.9
    assert reached > expected - 0.03
