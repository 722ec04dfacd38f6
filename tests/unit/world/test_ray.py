"""Worlds of Ray's workers; `tests/nodes/test_ray.py` has real ones."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import UsageError, WorldError
from lockstep.state.files import run_file
from lockstep.state.record import provenance
from lockstep.world.environments import detect, ray

WORKER = {"RAY_RAYLET_PID": str(os.getppid())}
TRAIN = {
    **WORKER,
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "40001",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "a,b",
    "SLURM_JOB_ID": "7",
}


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like a worker of Ray."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/default_worker.py", "--node-manager-port=1"])


def in_group(monkeypatch: pytest.MonkeyPatch, *held: str, bundles: int = 2) -> None:
    """Let a package `ray` say that this worker holds resources in a placement group of two nodes."""
    group = SimpleNamespace(id=bytes.fromhex("0a"), bundle_count=bundles)
    nodes = {"bundles_to_node_id": {0: "first", 1: "second"}}
    known = [
        {"NodeID": name, "NodeManagerAddress": address}
        for name, address in (("second", "10.0.0.2"), ("first", "10.0.0.1"))
    ]
    core = SimpleNamespace(resource_ids=lambda: dict.fromkeys(held, ()))
    found: Any = ModuleType("ray")
    found.is_initialized = lambda: True
    found.nodes = lambda: known
    found.get_runtime_context = lambda: SimpleNamespace(worker=SimpleNamespace(core_worker=core))
    found.util = SimpleNamespace(
        get_current_placement_group=lambda: group if held else None,
        placement_group_table=lambda _: nodes,
    )
    monkeypatch.setitem(sys.modules, "ray", found)


def test_ray_train_sets_the_variables() -> None:
    world = detect(TRAIN)
    assert (world.environment, world.rank, world.size) == ("ray", 1, 2)
    assert (world.address, world.port) == ("10.0.0.1", 40001)
    assert not world.placed  # Ray's LOCAL_WORLD_SIZE is that of one of several nodes


def test_a_bundle_has_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    in_group(monkeypatch, "CPU_group_0a", "CPU_group_1_0a", "bundle_group_0a", "bundle_group_1_0a")
    world = detect({**WORKER, **SLURM})
    assert (world.environment, world.rank, world.size) == ("ray", 1, 2)
    assert (world.address, world.key, world.placed) == ("10.0.0.1", "ray-0a", False)


@pytest.mark.parametrize("held", [(), ("bundle_group_0_0a",)])
def test_a_worker_of_its_own_is_alone(
    monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...]
) -> None:
    in_group(monkeypatch, *held, bundles=1)
    world = detect({**WORKER, **SLURM})
    assert (world.environment, world.size) == ("ray", 1)


def test_an_address_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_group(monkeypatch)
    with pytest.raises(UsageError, match="there is no rank for this process"):
        detect({**WORKER, "LOCKSTEP_INIT_METHOD": "tcp://10.0.0.1:29500"})


def test_ranks_that_a_worker_starts_are_not_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    other = str(
        os.getpid()
    )  # not this process's parent, which may have any number: in a container, 1
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCKSTEP_LAUNCHER": "1", "RAY_RAYLET_PID": other}
    assert detect(own).environment == "lockstep"
    own["TORCHELASTIC_RUN_ID"] = own.pop("LOCKSTEP_LAUNCHER")
    assert detect(own).environment == "torchrun"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert detect(TRAIN).environment == "torchrun"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "0"}, "ray: RANK is set alone; expected RANK and WORLD_SIZE, or neither"),
        ({"WORLD_SIZE": "2"}, "ray: WORLD_SIZE is set alone"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "ray: 2 processes but no rendezvous address"),
        ({"LOCKSTEP_LAUNCHER": "1"}, "ray: this worker has the variable LOCKSTEP_LAUNCHER"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "ray: this worker has the variable TORCHELASTIC_RUN_ID"),
    ],
)
def test_halves_are_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(WorldError) as caught:
        detect({**WORKER, **environ})
    assert text in str(caught.value)


def test_a_worker_without_one_bundle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_group(monkeypatch, "CPU_group_0a")
    with pytest.raises(WorldError, match="holds 0 bundle\\(s\\) of placement group 0a"):
        detect(WORKER)


def test_arguments_of_a_worker_do_not_belong_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    assert run_file.script_and_arguments() == ("ray", [])
    assert (
        provenance.command(0)["script"] is None
    )  # nothing to start again: lockstep replay refuses


def test_the_directory_is_in_the_storage_of_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SimpleNamespace(type_name="local")
    storage = SimpleNamespace(storage_filesystem=files, experiment_fs_path="/shared/trial")
    train: Any = ModuleType("ray.train")
    train.get_context = lambda: SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    assert ray.run_directory("small") is None  # no worker
    for name, value in TRAIN.items():
        monkeypatch.setenv(name, value)
    assert str(ray.run_directory("small")) == "/shared/trial/small"
    files.type_name = "s3"
    with pytest.raises(UsageError, match="the storage of Ray Train is of type s3"):
        ray.run_directory("small")


def test_an_actor_with_variables_has_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_context() -> None:
        raise RuntimeError("outside of a Ray Train training function")

    train: Any = ModuleType("ray.train")
    train.get_context = get_context
    monkeypatch.setitem(sys.modules, "ray.train", train)
    for name, value in TRAIN.items():
        monkeypatch.setenv(name, value)
    assert ray.run_directory("small") is None
