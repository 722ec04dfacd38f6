"""Settings of the parameter server: what a run takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engine.training.parallel_dims import Groups, choose_mesh
from lockstep.errors import UsageError
from lockstep.registry import STRATEGIES
from lockstep.settings import Settings, from_environment
from lockstep.world import World

LAUNCHED = World(
    rank=0,
    size=2,
    local_size=2,
    address="127.0.0.1",
    port=1234,
    environment="lockstep",
    reason="it is set",
)
TORCHRUN = World(
    rank=0, size=2, local_size=2, address="127.0.0.1", port=1234, environment="torchrun", reason="x"
)


def settings(**more: Any) -> Settings:
    return Settings(name="run", **{"strategy": "ps", "servers": 2, **more})


@pytest.mark.parametrize("more", [{}, {"exchange": "server"}, {"staleness": 0}, {"staleness": 3}])
def test_what_can_be(more: dict[str, Any]) -> None:
    assert choose_mesh(settings(**more), LAUNCHED).size == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"servers": 0}, "strategy=ps with 0 servers"),
        ({"strategy": "ddp"}, "servers is 2 with strategy=ddp"),
        ({"exchange": "tree"}, "exchange=tree with strategy=ps"),
        ({"exchange": "bf16", "exact": False}, "exchange=bf16 with strategy=ps"),
        ({"strategy": "fsdp", "servers": 0, "staleness": 2}, "staleness is 2 with strategy=fsdp"),
        (
            {"strategy": "diloco", "servers": 0, "staleness": 1, "exact": False},
            "staleness is 1 with strategy=diloco",
        ),
        ({"strategy": "ddp", "servers": 0, "exchange": "server"}, "exchange=server with strategy"),
        ({"staleness": 0, "precision": "fp16"}, "precision=fp16 with staleness=0"),
        ({"mesh": "1x2"}, "a mesh of 1x2 spreads each model"),
    ],
)
def test_what_cannot(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        choose_mesh(settings(**more), LAUNCHED)
    assert refused.value.hint


@pytest.mark.parametrize("strategy", ["auto", "ddp", "dp", "single"])
def test_staleness_without_servers(strategy: str) -> None:
    alone = World(rank=0, size=1, environment="single", reason="x")
    assert choose_mesh(settings(strategy=strategy, servers=0, staleness=4), alone).size == 1


def test_other_launchers_start_none_and_rank_0_does() -> None:
    assert choose_mesh(settings(), TORCHRUN).size == 2
    with pytest.raises(UsageError, match="strategy=ps with 0 servers") as refused:
        choose_mesh(settings(servers=0), TORCHRUN)
    assert "LOCKSTEP_SERVERS=1" in refused.value.hint


def test_a_number_of_servers_left_in_a_shell_disturbs_nobody_else() -> None:
    assert choose_mesh(settings(strategy="auto"), TORCHRUN).size == 2


@pytest.mark.parametrize("value", [-1, 1.5, "2"])
def test_a_staleness_that_is_none(value: Any) -> None:
    with pytest.raises(UsageError, match=r"staleness is .*; expected .*at least 0"):
        settings(staleness=value)


def test_variables() -> None:
    found = from_environment(
        Settings(name="run"), {"LOCKSTEP_SERVERS": "3", "LOCKSTEP_STALENESS": "0"}
    )
    assert (found.servers, found.staleness) == (3, 0)


def test_even_a_single_worker_has_a_group_but_no_mesh() -> None:
    import torch

    from lockstep.engine.layout.mesh import Mesh

    assert STRATEGIES.find("ps").needs_group
    group: Any = object()
    groups = Groups.of(group, Mesh(1), "ps", torch.device("cpu"))
    assert (groups.data, groups.mesh) == (group, None)
