"""Read rank, world size and rendezvous of a worker of Ray.

It is a worker of Ray Train, or runs actors and tasks in a bundle of a placement group. Ray Train sets
`RANK`, `WORLD_SIZE` and so on, and makes a process group; scripts with actors may set these variables, too.
Without the variables, the rank is the index of the worker's bundle, which only Ray's API returns:
https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError, WorldError
from lockstep.world.environments import init_method, torchrun
from lockstep.world.model import World

#: Variables of launchers whose processes don't start Ray.
_LAUNCHERS = (torchrun.MARK, "TORCHELASTIC_RUN_ID")


def is_worker(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of Ray, which runs actors and tasks."""
    return "RAY_RAYLET_PID" in environ and Path(sys.argv[0]).name == "default_worker.py"


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) of a Ray worker; `None` in other processes.

    Raises:
        WorldError: if variables are missing, or Ray was started by a launcher's worker.
    """
    if not is_worker(environ):
        return None
    if (inherited := next((name for name in _LAUNCHERS if name in environ), None)) is not None:
        if environ["RAY_RAYLET_PID"] != str(os.getppid()):
            return None  # a rank of `lockstep.launch` in a worker
        raise WorldError(
            f"ray: this worker has the variable {inherited}; expected that no launcher has started Ray",
            hint="start Ray, and the script that gives it work, with python",
        )
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if len(given) == 1:
        raise WorldError(
            f"ray: {given[0]} is set alone; expected RANK and WORLD_SIZE, or neither",
            hint="TorchTrainer sets both; for actors, put both into env_vars of runtime_env",
        )
    if given:
        return torchrun.read(environ, environment="ray", reason="RANK and WORLD_SIZE are set")
    if (ray := sys.modules.get("ray")) is None or not ray.is_initialized():
        return None  # a process that the worker has started by `multiprocessing`
    group = ray.util.get_current_placement_group()
    if group is not None and group.bundle_count > 1:
        return _in_bundle(ray, group)
    # Variables of Slurm or Kubernetes, if any, number the machines on which Ray was started.
    alone = World(reason="a worker of Ray, outside of placement groups with several bundles")
    return None if init_method.has_address(environ) else alone


def _in_bundle(ray: Any, group: Any) -> World:
    """Return the world of this worker in a placement group that has a worker in each bundle.

    The rank is the index of this worker's bundle. `ray` is the imported module, `group` the placement
    group.
    """
    name = group.id.hex()
    held = ray.get_runtime_context().worker.core_worker.resource_ids()
    found = [int(m[1]) for key in held if (m := re.fullmatch(rf"bundle_group_(\d+)_{name}", key))]
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if len(found) != 1 or nodes.get(0) not in hosts:
        raise WorldError(
            f"ray: this worker holds {len(found)} bundle(s) of placement group {name}, and bundle 0 is on "
            f"node {nodes.get(0)!r}; expected one bundle, and a node of the cluster",
            hint="PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=RANK)",
        )
    return World(
        rank=found[0],
        size=group.bundle_count,
        placed=False,
        address=hosts[nodes[0]],
        key=f"ray-{name}",
        reason="the bundle of its placement group has a number",
    )


def run_directory(name: str) -> Path | None:
    """Return the directory of run `name` in the storage of Ray Train; `None` outside of Ray Train.

    The working directory of Ray Train's workers is removed with the cluster, and differs from node to node.

    Raises:
        UsageError: if the storage is not a file system of this machine.
    """
    train = sys.modules.get("ray.train")
    if train is None or not is_worker(os.environ) or "RANK" not in os.environ:
        return None
    try:
        storage = train.get_context().get_storage()
    except (RuntimeError, DeprecationWarning):  # variables of actors, or of Ray Tune
        return None
    if (kind := storage.storage_filesystem.type_name) not in ("local", "py::fsspec+local"):
        raise UsageError(
            f"the storage of Ray Train is of type {kind}; expected a directory, for checkpoints of the run",
            hint="RunConfig(storage_path=DIR) on a file system that all nodes share, or "
            "lockstep.Run(run_dir=DIR)",
        )
    return Path(storage.experiment_fs_path) / name
