"""Exchanges of the approximate class, and fp16, where they cannot work."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.choose import choose_exchange, exactness_of
from lockstep.engine.layout.mesh import Mesh
from lockstep.engine.strategies.checks import check_settings
from lockstep.engine.training.parallel_dims import choose_mesh
from lockstep.errors import ExactnessError, ModelError, UsageError
from lockstep.registry import EXCHANGES, STRATEGIES
from lockstep.settings import Settings
from lockstep.world import World

APPROXIMATE = EXCHANGES.where(lambda one: one.exactness == "approximate")
#: Strategies whose ranks train by themselves for some steps at a time.
LOCAL = STRATEGIES.where(lambda entry: entry.averages)
WORLD = World(rank=0, size=2, local_size=2, local_rank=0, address="x", port=1)


def choose(**asked: object) -> str:
    settings = Settings(name="test", **asked)  # type: ignore[arg-type]
    choose_mesh(settings, WORLD)
    return choose_exchange(
        STRATEGIES.find(settings.strategy),
        settings.exchange,
        Forest.of(2, 2, 0),
        precision=settings.precision,
        one_host=True,
        device="cpu",
        exact=settings.exact,
    )


@pytest.mark.parametrize("exchange", APPROXIMATE)
def test_their_class(exchange: str) -> None:
    with pytest.raises(ExactnessError, match=f"exchange={exchange} trains by other sums") as seen:
        choose(exchange=exchange)
    assert "--no-exact" in seen.value.hint
    assert choose(exchange=exchange, exact=False) == exchange
    assert exactness_of(exchange, Forest.of(2, 2, 0)) == "approximate"


@pytest.mark.parametrize("strategy", LOCAL)
def test_strategies_that_average_parameters(strategy: str) -> None:
    refused = f"strategy={strategy} trains by other mathematics"
    with pytest.raises(ExactnessError, match=refused) as seen:
        choose(strategy=strategy)
    assert "--no-exact" in seen.value.hint
    assert choose(strategy=strategy, exact=False, precision="bf16") == "tree"
    with pytest.raises(UsageError, match=f"precision=fp16 with strategy={strategy}") as seen_fp16:
        choose(strategy=strategy, exact=False, precision="fp16")
    assert "bf16" in seen_fp16.value.hint
    with pytest.raises(UsageError, match=f"exchange=bf16 with strategy={strategy}"):
        choose(strategy=strategy, exact=False, exchange="bf16")
    one = Settings(name="test", strategy=strategy)  # on one rank it is the run of one process
    assert choose_mesh(one, World(rank=0, size=1, address="x", port=1)) == Mesh(1)


def test_fp16_by_ranks_that_remember_what_they_left_out() -> None:
    """An infinite gradient would be added to every step that follows."""
    with pytest.raises(
        UsageError, match="precision=fp16 with exchange=powersgd: ranks add"
    ) as seen:
        choose(exchange="powersgd", exact=False, precision="fp16")
    assert "bf16" in seen.value.hint
    assert choose(exchange="powersgd", exact=False, precision="bf16") == "powersgd"
    assert choose(exchange="bf16", exact=False, precision="fp16") == "bf16"


def test_fp16_by_servers_that_update() -> None:
    settings = Settings(name="test", strategy="ps", staleness=0, servers=1, precision="fp16")
    world = World(rank=0, size=1, address="x", port=1, environment="lockstep")
    with pytest.raises(UsageError, match="precision=fp16 with staleness=0"):
        choose_mesh(settings, world)


def test_sync_every() -> None:
    with pytest.raises(UsageError, match="sync_every is 0; expected at least 1"):
        Settings(name="test", sync_every=0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_sync_every_where_ranks_sum_in_every_step(strategy: str, size: int) -> None:
    world = World(rank=0, size=size, local_size=size, address="x", port=1)
    settings = Settings(name="test", sync_every=4, strategy=strategy, exact=False)
    with pytest.raises(UsageError, match=f"sync_every is 4 with strategy={strategy}") as seen:
        choose_mesh(settings, world)
    assert "local-sgd" in seen.value.hint


@pytest.mark.parametrize("strategy", LOCAL)
def test_sync_every_of_ranks_that_average(strategy: str) -> None:
    settings = Settings(name="test", sync_every=4, strategy=strategy, exact=False)
    assert choose_mesh(settings, WORLD) == Mesh(2)


def test_keywords_are_those_of_powersgd() -> None:
    theirs = set(inspect.signature(PowerSGDState).parameters) - {"process_group"}
    assert set(EXCHANGES.find("powersgd").keywords) == theirs


def test_keywords_of_powersgd_are_taken_on_every_layout() -> None:
    import torch
    from torch import nn

    where = {"exact": True, "device": torch.device("cpu")}
    check_settings(nn.Linear(1, 1), {"matrix_approximation_rank": 2}, **where)
    with pytest.raises(ModelError, match="no setting matrix_rank"):
        check_settings(nn.Linear(1, 1), {"matrix_rank": 2}, **where)
