"""torchrun's variables, complete, in part, and left over from another launcher."""

from __future__ import annotations

import pytest

from lockstep.errors import WorldError
from lockstep.world import World
from lockstep.world.environments import init_method, torchrun

PLACE = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
#: What torchrun gives to rank 5 of 8 on two nodes.
RANK_5 = {
    **PLACE,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
#: What torchrun gives to the only process of a script that starts ranks itself.
LONE = {
    **PLACE,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}


def read(environ: dict[str, str]) -> World:
    return torchrun.read(environ, environment="torchrun", reason="")


def numbers(world: World) -> tuple[int, int, int, int, int, int]:
    return (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.node_rank,
        world.node_count,
    )


def test_all_variables() -> None:
    world = read(RANK_5)
    assert numbers(world) == (5, 8, 1, 4, 1, 2)
    assert (world.placed, world.address, world.port) == (True, "node0", 29500)
    assert (world.generation, world.agent_store, world.file) == (0, False, None)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_without_rank_and_size_it_is_not_torchrun(missing: str) -> None:
    environ = {name: RANK_5[name] for name in RANK_5 if name != missing}
    assert torchrun.detect(environ) is None
    with pytest.raises(WorldError, match=f"{missing} is not set, though its sister variables are"):
        read(environ)


def test_local_rank_alone_says_nothing() -> None:
    assert torchrun.detect({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **PLACE}) is None


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"LOCAL_RANK": "1"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},  # two of its ranks share each host, it says
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "9"},
        LONE,
        {**LONE, "LOCAL_RANK": "7"},  # stale values aren't looked at
        {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
    ],
    ids=repr,
)
def test_where_a_rank_is_may_be_open(rest: dict[str, str]) -> None:
    world = read({**rest, **PLACE, "RANK": "2", "WORLD_SIZE": "4"})
    assert numbers(world) == (2, 4, 2, 4, 0, 1)
    assert not world.placed


def test_a_launcher_of_one_node_may_leave_its_number_out() -> None:
    environ = {**PLACE, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    world = read(environ)
    assert world.placed
    assert numbers(world) == (2, 4, 2, 4, 0, 1)


def test_nodes_may_be_counted_from_their_sizes() -> None:
    environ = {name: RANK_5[name] for name in RANK_5 if name != "GROUP_WORLD_SIZE"}
    assert numbers(read(environ)) == (5, 8, 1, 4, 1, 2)


def test_one_rank_on_each_node_is_no_leftover() -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    world = read({**LONE, **rank})
    assert world.placed
    assert numbers(world) == (1, 2, 0, 1, 1, 2)


def test_a_lone_process_is_placed() -> None:
    world = read({**LONE, "RANK": "0", "WORLD_SIZE": "1"})
    assert world.placed
    assert numbers(world) == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE is -1; expected at least 1"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE is 'two'; expected an integer"),
        ({"LOCAL_RANK": "-1"}, "local_rank is -1 with local_size 4"),
        ({"GROUP_RANK": "x"}, "GROUP_RANK is 'x'; expected an integer"),
        ({"GROUP_WORLD_SIZE": "0"}, "node_rank is 1 with node_count 0"),
        ({"RANK": "-1"}, "rank is -1 with size 8"),
        ({"WORLD_SIZE": "0"}, "rank is 5 with size 0"),
        ({"RANK": ""}, "RANK is ''; expected an integer"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; expected a port"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is -1; expected a port"),
        ({"MASTER_PORT": "0"}, "no rendezvous address"),
        ({"MASTER_ADDR": ""}, "no rendezvous address"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is 'x'"),
    ],
)
def test_contradictions_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(WorldError) as caught:
        read({**RANK_5, **changes})
    assert said in str(caught.value)


def test_a_file_is_a_meeting_place_too() -> None:
    world = read({"RANK": "1", "WORLD_SIZE": "2", init_method.FILE: "/shared/rendezvous"})
    assert (world.file, world.address, world.port) == ("/shared/rendezvous", None, None)
