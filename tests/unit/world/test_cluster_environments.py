"""Worlds of pods and machines that Kubernetes, Kubeflow, SkyPilot and Volcano number."""

from __future__ import annotations

import socket

import pytest

from lockstep.errors import UsageError, WorldError
from lockstep.launch.nodes.config import Nodes, rendezvous_config
from lockstep.world.environments import detect

POD = {"JOB_COMPLETION_INDEX": "1"}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "t-node-0-0.t",
    "PET_MASTER_PORT": "29400",
    **POD,
}
PYTORCHJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "MASTER_ADDR": "t-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "SKYPILOT_TASK_ID": "sky-1",
}
VOLCANO = {"VC_WORKER_HOSTS": "t-worker-0.t,t-worker-1.t", "VK_TASK_INDEX": "1"}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is pod 1 of an Indexed Job `t` with the service `s`."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "t-1.s.default.svc.cluster.local")
    monkeypatch.setattr(socket, "gethostname", lambda: "t-worker-1")


@pytest.mark.parametrize(
    ("environ", "environment", "address", "port"),
    [
        ({**POD, "PET_NNODES": "2"}, "kubernetes", "t-0.s.default.svc.cluster.local", None),
        ({**POD, "PET_NNODES": "1:2", "MASTER_ADDR": "t-0.s"}, "kubernetes", "t-0.s", None),
        (TRAINJOB, "kubeflow", "t-node-0-0.t", 29400),
        (PYTORCHJOB, "kubeflow", "t-master-0", 23456),
        (SKYPILOT, "skypilot", "10.0.0.1", None),
        (VOLCANO, "volcano", "t-worker-0.t", None),
    ],
)
def test_one_rank_in_each_of_two_pods(environ, environment, address, port):
    world = detect(environ)
    assert (world.environment, world.rank, world.size) == (environment, 1, 2)
    assert (world.node_rank, world.node_count, world.local_rank, world.local_size) == (1, 2, 0, 1)
    assert (world.address, world.port) == (address, port)


def test_a_volcano_job_with_two_tasks_numbers_the_masters_first():
    world = detect({**VOLCANO, "VC_MASTER_HOSTS": "t-master-0.t"})
    assert (world.rank, world.size, world.address) == (2, 3, "t-master-0.t")


@pytest.mark.parametrize(
    "environ",
    [
        POD,  # a sweep: the number of pods is unknown
        {**POD, "PET_NNODES": "1"},
        {**TRAINJOB, "PET_NNODES": "1"},
        {
            **SKYPILOT,
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NODE_IPS": "a",
            "SKYPILOT_NUM_NODES": "1",
        },
        {"VC_WORKER_HOSTS": "t-worker-0.t", "VK_TASK_INDEX": "0"},
        {"VK_TASK_INDEX": "0"},
    ],
)
def test_a_process_of_its_own(environ):
    assert detect(environ).environment == "single"


def test_workers_in_a_pod_are_those_of_their_launcher():
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "WORLD_SIZE": "4"}
    world = detect({**PYTORCHJOB, **local})
    assert (world.environment, world.rank, world.size) == ("torchrun", 3, 4)
    spawned = detect({**PYTORCHJOB, "RANK": "0", "WORLD_SIZE": "2"})
    assert (spawned.environment, spawned.rank) == ("torchrun", 0)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"JOB_COMPLETION_INDEX": "2", "PET_NNODES": "2", "MASTER_ADDR": "t-0"},
            "JOB_COMPLETION_INDEX is 2, and PET_NNODES says 2 machine(s); expected 0 to 1",
        ),
        ({"JOB_COMPLETION_INDEX": "x", "PET_NNODES": "2"}, "JOB_COMPLETION_INDEX is 'x'"),
        (
            {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2"},
            "expected the name of a pod, JOB-0.SERVICE",
        ),
        ({**POD, "PET_NNODES": "many"}, "PET_NNODES is 'many'; expected an integer"),
        (without(TRAINJOB, "PET_NNODES"), "PET_NNODES is not set, though its sister variables are"),
        (without(TRAINJOB, "PET_MASTER_ADDR"), "PET_MASTER_ADDR and PET_MASTER_PORT are not"),
        (without(PYTORCHJOB, "MASTER_PORT"), "PET_MASTER_ADDR and PET_MASTER_PORT are not"),
        ({**PYTORCHJOB, "PET_NODE_RANK": "2", "RANK": "2"}, "PET_NODE_RANK is 2"),
        (
            {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"},
            "no launcher has started this",
        ),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE is auto"),
        (without(SKYPILOT, "SKYPILOT_NODE_IPS"), "SKYPILOT_NODE_IPS has no address"),
        (without(SKYPILOT, "SKYPILOT_NODE_RANK"), "SKYPILOT_NODE_RANK is not set"),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "3"}, "has 2 address(es), but SKYPILOT_NUM_NODES is 3"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK is 2"),
        (without(VOLCANO, "VK_TASK_INDEX"), "neither of VC_TASK_INDEX and VK_TASK_INDEX"),
        ({**VOLCANO, "VK_TASK_INDEX": "2"}, "VK_TASK_INDEX is 2"),
        (
            {"VC_A_HOSTS": "t-a-0.t", "VC_B_HOSTS": "t-b-0.t", "VK_TASK_INDEX": "0"},
            "this host is 't-worker-1', and the pods of the job's tasks are t-a-0, t-b-0",
        ),
    ],
)
def test_half_of_the_variables(environ, said):
    with pytest.raises(WorldError) as caught:
        detect(environ)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "flags", "source"),
    [
        (POD, {"count": 2}, "kubernetes"),
        (POD, {"count": 2, "least": 1}, "kubernetes"),
        ({**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"}, {"count": 2}, "kubeflow"),
        (PYTORCHJOB, {"count": 2, "least": 1, "rank": 1}, "kubeflow"),
        (SKYPILOT, {}, "skypilot"),
        (VOLCANO, {}, "volcano"),
    ],
)
def test_a_launcher_in_each_pod(environ, flags, source):
    config = rendezvous_config(Nodes(**flags), ["train.py"], environ)
    assert config is not None
    assert (config.source, config.count, config.index) == (source, 2, 1)
    assert config.least == flags.get("least")


def test_launchers_in_pods_that_do_not_fit():
    with pytest.raises(UsageError, match="--nnodes is 3, but skypilot started 2 launchers"):
        rendezvous_config(Nodes(count=3), ["train.py"], SKYPILOT)
    with pytest.raises(UsageError, match="skypilot started 2 launchers, and ends all launchers"):
        rendezvous_config(Nodes(count=2, least=1), ["train.py"], SKYPILOT)
    with pytest.raises(WorldError, match="JOB_COMPLETION_INDEX is 5"):
        rendezvous_config(
            Nodes(count=2), ["train.py"], {"JOB_COMPLETION_INDEX": "5", "MASTER_ADDR": "a"}
        )
