"""From environment variables to worlds."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError, WorldError
from lockstep.world import World, detect

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


def test_torchrun():
    assert detect(TORCHRUN) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node_rank=1,
        node_count=2,
        address="node0",
        port=29500,
        generation=3,
        agent_store=True,
        environment="torchrun",
        reason="RANK and WORLD_SIZE are set",
    )


def test_rank_and_size_alone_mean_one_node():
    world = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (world.local_rank, world.local_size, world.node_count, world.agent_store) == (
        1,
        2,
        1,
        False,
    )


def test_the_mark_wins_over_torchrun():
    assert detect({**TORCHRUN, "LOCKSTEP_LAUNCHER": "0.1.0"}).environment == "lockstep"


def test_an_environment_can_be_named():
    assert detect({**TORCHRUN, "LOCKSTEP_ENVIRONMENT": "single"}).size == 1


@pytest.mark.parametrize(
    ("variables", "error", "said"),
    [
        ({"LOCKSTEP_ENVIRONMENT": "bicycle"}, UsageError, "'bicycle'; expected one of lockstep"),
        ({"LOCKSTEP_ENVIRONMENT": "torchrun"}, UsageError, "variables of torchrun are not set"),
        ({**TORCHRUN, "RANK": "8"}, WorldError, "rank is 8 with size 8"),
        ({**TORCHRUN, "RANK": "one"}, WorldError, "RANK is 'one'; expected an integer"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, WorldError, "local_rank is 4 with local_size 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, WorldError, "LOCAL_WORLD_SIZE is 0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, WorldError, "9 local processes in a world of 8"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, WorldError, "node_rank is 2 with node_count 2"),
        ({"LOCKSTEP_LAUNCHER": "0.1.0"}, WorldError, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, WorldError, "no address to meet at"),
    ],
)
def test_contradictions_are_named(variables, error, said):
    with pytest.raises(error) as caught:
        detect(variables)
    assert said in str(caught.value)
