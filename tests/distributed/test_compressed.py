"""Exchanges that ship less than the gradients: bf16, fp16, PowerSGD."""

from __future__ import annotations

import pytest

from lockstep.testing import RankError, run_ranks
from tests.distributed import low_precision as jobs
from tests.distributed.jobs import train_formats

pytestmark = pytest.mark.ranks(3)


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize("exchange", ["bf16", "fp16", "powersgd"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 7)])
def test_ranks_end_alike_and_twice_the_same(exchange: str, ranks: int, replicas: int) -> None:
    settings = {"exchange": exchange, "replicas": replicas}
    first, second = (run_ranks(jobs.train_local, ranks, settings) for _ in range(2))
    assert first == second
    assert all(one == first[0] for one in first)
    assert first[0][1] == "approximate"
    exact = run_ranks(jobs.train_local, ranks, {**settings, "exchange": "tree"})
    assert exact[0][0] != first[0][0], "something else is shipped"


def test_powersgd_compresses_as_it_is_told() -> None:
    """Of the linear layer's gradient a product of rank 1 is shipped, from the third step on."""
    settings = {"exchange": "powersgd", "replicas": 2}
    keywords = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    first, second = (run_ranks(jobs.train_local, 2, settings, keywords) for _ in range(2))
    assert first == second
    assert first[0] == first[1]
    assert first[0][0] != run_ranks(jobs.train_local, 2, settings)[0][0]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["bf16", "powersgd"])
def test_parameters_in_any_order_of_memory(exchange: str) -> None:
    settings = {"exchange": exchange, "exact": False, "replicas": 4}
    first, second = (run_ranks(train_formats, 2, settings) for _ in range(2))
    assert first == second
    assert first[0] == first[1]


def test_settings_that_powersgd_refuses() -> None:
    with pytest.raises(RankError, match="ModelError: PowerSGD does not take its settings: Expect"):
        run_ranks(jobs.train_local, 2, {"exchange": "powersgd"}, {"start_powerSGD_iter": 1})


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["bf16", "fp16", "powersgd"])
def test_notes_on_unused_parameters_come_through(exchange: str) -> None:
    """Weight decay must not move a part that no rank has used."""
    first, second = run_ranks(jobs.train_unused, 2, {"exchange": exchange})
    assert first == second
    assert first[1]
