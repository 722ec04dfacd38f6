"""The promise: one digest on every layout (B1)."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.testing import RankError, assert_same, run_ranks
from tests.distributed import jobs

pytestmark = pytest.mark.ranks(4)


@pytest.mark.wide(beyond=3)
@pytest.mark.parametrize(
    ("job", "args"),
    [
        (jobs.train_conv, ({}, {})),
        (jobs.train_routed, ()),
        (jobs.train_alternating, ()),
        (jobs.train_gan, ()),
        (jobs.train_adamw, ()),
        (jobs.train_adamw, ("bf16",)),
        (jobs.train_stream, (0,)),
    ],
)
def test_one_digest_on_1_to_4_ranks(job: Any, args: tuple[Any, ...]) -> None:
    assert_same(job, [1, 2, 3, 4], *args, replicas=4)


@pytest.mark.wide
def test_resnet18_with_dropout() -> None:
    assert_same(jobs.train_resnet, [1, 2, 3, 4], replicas=4, timeout=120)


def test_six_replicas_on_1_4_and_5_ranks() -> None:
    assert_same(jobs.train_conv, [1, 4, 5], {}, {}, replicas=6)


def test_workers_and_augmentation_do_not_matter() -> None:
    digests = {
        run_ranks(jobs.train_augmented, ranks, workers, environ={"LOCKSTEP_REPLICAS": "4"})[0]
        for ranks, workers in [(1, 0), (1, 3), (2, 1), (3, 0), (4, 1), (4, 3)]
    }
    assert len(digests) == 1


@pytest.mark.wide
def test_a_stream_read_by_a_worker() -> None:
    assert_same(jobs.train_stream, [1, 2, 3], 1, replicas=3)


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize("exchange", ["tree", "shared-memory"])
@pytest.mark.parametrize("replicas", [3, 5])
def test_every_exact_exchange(exchange: str, replicas: int) -> None:
    first = run_ranks(jobs.train_conv, 1, {"replicas": replicas}, {})
    for ranks in (2, 3):
        settings = {"replicas": replicas, "exchange": exchange}
        assert run_ranks(jobs.train_conv, ranks, settings, {})[:1] == first


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["tree", "shared-memory"])
@pytest.mark.parametrize("models", [1, 2])
def test_parameters_in_any_order_of_memory(exchange: str, models: int) -> None:
    """Channels last, transposed, with gaps, complex: with replicas kept on a rank, and summed late."""
    assert_same(jobs.train_formats, [1, 2, 3, 4], {"exchange": exchange}, models, replicas=4)


def test_parameters_that_are_turned_in_memory_afterwards() -> None:
    """DDP has made its buckets: it would put gradients of one order where another one is read."""
    with pytest.raises(RankError, match=r"0\.weight of .* was given a different order") as caught:
        run_ranks(jobs.turn_in_memory, 2, 8)
    assert "before run.model" in str(caught.value)


def test_parameters_whose_strides_change_but_not_their_order() -> None:
    """One channel: channels last is the order that there is. 2 ranks, one of which keeps replicas."""
    one, two, three = (run_ranks(jobs.turn_in_memory, n, 1, 3) for n in (1, 2, 3))
    assert one * 2 == two
    assert one * 3 == three


def test_native_where_it_provably_is_exact() -> None:
    first = run_ranks(jobs.train_conv, 1, {"replicas": 4}, {})
    assert run_ranks(jobs.train_conv, 2, {"replicas": 4, "exchange": "native"}, {})[:1] == first


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    "keywords",
    [
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-3},
        {"find_unused_parameters": False},
        {"static_graph": True},
    ],
)
def test_ddp_keywords_leave_the_bits_alone(keywords: dict[str, Any]) -> None:
    first = run_ranks(jobs.train_conv, 1, {"replicas": 4}, {})
    for ranks in (2, 4):
        assert run_ranks(jobs.train_conv, ranks, {"replicas": 4}, keywords)[:1] == first


def test_another_seed_gives_other_bits() -> None:
    digests = {run_ranks(jobs.train_conv, 1, {"seed": seed}, {})[0] for seed in (0, 1)}
    assert len(digests) == 2


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_counts_every_sample_once(ranks: int) -> None:
    expected = run_ranks(jobs.evaluate, 1, 1797, environ={"LOCKSTEP_REPLICAS": "4"})[0]
    assert expected[0] == 1797
    assert expected[3] is True
    for values in run_ranks(jobs.evaluate, ranks, 1797, environ={"LOCKSTEP_REPLICAS": "4"}):
        assert values == expected
