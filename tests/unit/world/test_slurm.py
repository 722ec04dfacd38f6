"""Job steps of Slurm, and what only looks like one (A8)."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError, WorldError
from lockstep.world import World, detect
from lockstep.world.environments import slurm
from tests.unit.world import slurm_environments as recorded


def placed(variables: dict[str, str]) -> tuple[int, ...]:
    world = slurm.detect(variables)
    assert world is not None
    return (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.node_rank,
        world.node_count,
    )


def test_a_step_of_two_nodes():
    assert detect(recorded.STEP_RANK_2) == World(
        rank=2,
        size=4,
        local_rank=2,
        local_size=3,
        node_rank=0,
        node_count=2,
        address="n1",
        key="slurm-lockstep-1.0-0",
        environment="slurm",
        reason="SLURM_STEP_ID and SLURM_PROCID are set",
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CYCLIC_RANK_1", (1, 4, 0, 2, 1, 2)),
        ("STEP_OF_INTERACTIVE", (0, 3, 0, 2, 0, 2)),
        ("HET_RANK_1", (1, 3, 0, 2, 1, 2)),
        ("EIGHT_RANK_5", (5, 8, 5, 8, 0, 1)),
        ("SIXTEEN_RANK_11", (11, 16, 3, 8, 1, 2)),
    ],
)
def test_steps(name, expected):
    assert placed(getattr(recorded, name)) == expected


@pytest.mark.parametrize("name", ["BATCH_SCRIPT", "SALLOC_SHELL", "INTERACTIVE_STEP", "PTY_SHELL"])
def test_what_is_no_step(name):
    assert detect(getattr(recorded, name)).environment == "single"


def test_slurm_can_be_chosen():
    assert detect({**recorded.STEP_RANK_2, "LOCKSTEP_SLURM": "1"}).environment == "slurm"
    with pytest.raises(UsageError, match="variables of slurm are not set"):
        detect({**recorded.BATCH_SCRIPT, "LOCKSTEP_ENVIRONMENT": "slurm"})


def test_a_step_on_one_node_stays_on_it():
    one_node = {
        **recorded.STEP_RANK_2,
        "SLURM_STEP_NODELIST": "n2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }
    assert detect(one_node).address == "127.0.0.1"


def test_eight_tasks_on_one_node_and_sixteen_on_two_meet_at_the_first():
    assert detect(recorded.EIGHT_RANK_5).address == "127.0.0.1"
    assert detect(recorded.SIXTEEN_RANK_11).address == "SH-IDC1-10-5-36-65"


def test_the_rendezvous_address_can_be_chosen():
    chosen = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    world = detect({**recorded.STEP_RANK_2, **chosen})
    assert (world.address, world.port, world.key) == ("10.0.0.7", 29500, "slurm-lockstep-1.0-0")


def test_steps_and_restarts_have_keys_of_their_own():
    again = {**recorded.STEP_RANK_2, "SLURM_RESTART_COUNT": "2"}
    world = detect(again)
    assert (world.key, world.generation) == ("slurm-lockstep-1.0-2", 2)
    assert detect({**again, "SLURM_STEP_ID": "3"}).key == "slurm-lockstep-1.3-2"
    assert detect({**again, "SLURM_JOB_ID": "9"}).key == "slurm-lockstep-9.0-2"


def test_a_host_file_hides_where_rank_0_is():
    with pytest.raises(WorldError, match="no variable says where rank 0 is\nhint: set MASTER_ADDR"):
        detect(recorded.ARBITRARY_RANK_0)
    assert detect({**recorded.ARBITRARY_RANK_0, "MASTER_ADDR": "n2"}).address == "n2"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-"}, "the node list 'n[1-' cannot be parsed"),
        ({"SLURM_STEP_NODELIST": "n1"}, "'n1', 1 node(s), but SLURM_STEP_NUM_NODES is 2"),
        (
            {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_NUM_NODES": "3"},
            "3 node(s), but SLURM_STEP_TASKS_PER_NODE is '3,1', 2 node(s)",
        ),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 task(s), but SLURM_STEP_TASKS_PER_NODE is '3,1', 4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3;1"}, "'3;1'; expected one such as '2(x3),1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "''; expected one such as"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2 in a step of 2 node(s)"),
        ({"SLURM_PROCID": "4"}, "slurm: rank is 4 with size 4"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID is 'two'; expected an integer"),
        ({"SLURM_LOCALID": "3"}, "slurm: local_rank is 3 with local_size 3"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_contradictions_are_named(changed, said):
    with pytest.raises(WorldError) as caught:
        detect({**recorded.STEP_RANK_2, **changed})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
    ],
)
def test_a_missing_variable_is_named(name):
    variables = dict(recorded.STEP_RANK_2)
    del variables[name]
    with pytest.raises(WorldError, match=f"{name} is not set"):
        detect(variables)


def test_what_can_be_derived_may_be_missing():
    variables = dict(recorded.STEP_RANK_2)
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"):
        del variables[name]
    assert detect(variables) == detect(recorded.STEP_RANK_2)
    for name in ("SLURM_NTASKS", "SLURM_JOBID"):
        with pytest.raises(WorldError, match=f"{name} is not set"):
            detect({key: value for key, value in variables.items() if key != name})


@pytest.mark.parametrize("step", ["", "batch", "4294967291", "4294967290", "4294967292", "-1"])
def test_special_steps(step):
    assert detect({**recorded.STEP_RANK_2, "SLURM_STEP_ID": step}).environment == "single"
