"""From environment variables to worlds."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError, WorldError
from lockstep.world import detect
from lockstep.world.environments import given

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_no_variables_mean_a_single_process():
    world = detect({})
    assert (world.rank, world.size, world.environment, world.is_main) == (0, 1, "single", True)
    assert world.reason == "no launcher's variables are set"


def test_the_mark_wins_over_torchrun():
    assert detect({**TORCHRUN, "LOCKSTEP_LAUNCHER": "0.1.0"}).environment == "lockstep"


def test_an_environment_can_be_named():
    assert detect({**TORCHRUN, "LOCKSTEP_ENVIRONMENT": "single"}).size == 1


@pytest.mark.parametrize(
    ("variables", "error", "said"),
    [
        (
            {"LOCKSTEP_ENVIRONMENT": "bicycle"},
            UsageError,
            "'bicycle'; expected one of ray, lockstep",
        ),
        ({"LOCKSTEP_ENVIRONMENT": "torchrun"}, UsageError, "variables of torchrun are not set"),
        ({"LOCKSTEP_LAUNCHER": "0.1.0"}, WorldError, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, WorldError, "no rendezvous address"),
    ],
)
def test_contradictions_are_named(variables, error, said):
    with pytest.raises(error) as caught:
        detect(variables)
    assert said in str(caught.value)


PAIR = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_an_init_method_says_where_the_environment_says_who():
    world = detect({**TORCHRUN, "LOCKSTEP_INIT_METHOD": "tcp://node9:7"})
    assert (world.rank, world.size, world.address, world.port) == (5, 8, "node9", 7)
    assert not world.agent_store, "torchrun's store is elsewhere"
    assert detect({**TORCHRUN, "LOCKSTEP_INIT_METHOD": "file:///a/b"}).file == "/a/b"


@pytest.mark.parametrize("url", ["tcp://node9:7", "file:///a/b"])
def test_an_init_method_without_ranks_is_named(url):
    with pytest.raises(UsageError, match="there is no rank for this process; expected RANK"):
        detect({"LOCKSTEP_INIT_METHOD": url})


@pytest.mark.parametrize("url", ["", "env://"])
def test_an_init_method_that_says_nothing_leaves_a_single_process(url):
    assert detect({"LOCKSTEP_INIT_METHOD": url}).size == 1


def test_a_script_that_says_nothing_is_detected():
    assert given(environ={}) == detect({})
    assert given(environ=TORCHRUN) == detect(TORCHRUN)


def test_a_script_says_who_it_is():
    world = given("tcp://node9:7", 1, 2, environ={})
    assert (world.rank, world.size, world.address, world.port) == (1, 2, "node9", 7)
    assert (world.environment, world.placed) == ("given", False)


@pytest.mark.parametrize("environ", [TORCHRUN, PAIR, {}])
def test_a_scripts_init_method_wins_over_its_launchers_place(environ):
    world = given("tcp://node9:7", 0, 2, environ=environ)
    assert (world.rank, world.size, world.address, world.port) == (0, 2, "node9", 7)
    assert not world.agent_store


def test_a_variable_wins_over_the_scripts_init_method():
    environ = {**PAIR, "LOCKSTEP_INIT_METHOD": "tcp://theirs:2"}
    for world in (
        given("tcp://ours:1", environ=environ),
        given("file:///a", 0, 2, environ=environ),
    ):
        assert (world.address, world.port, world.file) == ("theirs", 2, None)


def test_a_script_that_repeats_its_launchers_numbers_has_the_launchers_world():
    # As init_process_group(rank=int(os.environ["RANK"]), …) does: the agent's store is where they meet.
    world = given(rank=5, world_size=8, environ=TORCHRUN)
    assert (world.placed, world.local_rank, world.node_rank) == (True, 1, 1)
    assert world.agent_store


def test_a_script_that_counts_otherwise_is_not_where_its_launcher_says():
    world = given(rank=1, world_size=3, environ=TORCHRUN)
    assert (world.placed, world.local_rank, world.local_size) == (False, 1, 3)
    assert not world.agent_store


@pytest.mark.parametrize(("rank", "size"), [(0, None), (None, 2)])
def test_half_of_who_a_script_is(rank, size):
    with pytest.raises(UsageError, match="expected both or neither"):
        given("tcp://node9:7", rank, size, environ={})


@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        (2, 2, "given: rank is 2 with size 2"),
        (-1, 2, "given: rank is -1 with size 2"),
        (0, 0, "given: rank is 0 with size 0"),
        (0, 2, "given: 2 processes but no rendezvous address"),
    ],
)
def test_a_script_that_contradicts_itself(rank, size, said):
    with pytest.raises(WorldError) as caught:
        given(None if "address" in said else "tcp://node9:7", rank, size, environ={})
    assert said in str(caught.value)


def test_a_store_of_the_scripts_own_needs_no_place():
    world = given(rank=1, world_size=2, has_store=True, environ={})
    assert (world.rank, world.size, world.address) == (1, 2, None)
    assert given(has_store=True, environ={"RANK": "1", "WORLD_SIZE": "2"}).size == 2
    assert given(has_store=True, environ={}).size == 1
