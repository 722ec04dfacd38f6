"""`--bind cores`: assign disjoint CPU cores of a node to its local ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

from lockstep.errors import UsageError
from lockstep.launch.devices.machine import Machine
from lockstep.launch.spec import LaunchSpec
from lockstep.world.cores import Core, Topology, show_list
from lockstep.world.devices_asked import CORES

Item = TypeVar("Item")

#: Environment variable with the list of CPUs that a worker is bound to.
PROCESSORS = "LOCKSTEP_PROCESSORS"


def variables(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    local_ranks: range,
    local_size: int,
) -> tuple[dict[str, str], ...]:
    """Return, for each of this launcher's ranks, the environment variables that bind it to CPUs.

    `local_ranks` are the numbers of these ranks on their node, and `local_size` is the number of all ranks
    on the node.

    Raises:
        UsageError: if there are fewer cores than ranks.
    """
    if spec.settings.value("bind", environ) in (None, "none"):
        return ({},) * len(local_ranks)
    found = shares(machine.topology, local_size)
    # The number of threads follows from the cores of the node, not from a rank's share.
    shared = {CORES: str(machine.cores)}
    return tuple({PROCESSORS: show_list(found[rank]), **shared} for rank in local_ranks)


def shares(topology: Topology, n: int) -> tuple[Core, ...]:
    """Return the CPUs of each of `n` ranks: disjoint sets of whole, neighbouring cores.

    `topology` has the cores by NUMA node. With at least as many ranks as NUMA nodes, a rank gets cores of
    one NUMA node; with fewer ranks, each gets whole NUMA nodes.

    Raises:
        UsageError: if there are fewer cores than ranks.
    """
    cores = sum(len(node) for node in topology)
    if n > cores:
        raise UsageError(
            f"--bind cores with {n} ranks on {cores} core(s); expected a core for each rank",
            hint="--bind none, or fewer ranks",
        )
    if n <= len(topology):
        groups = [[core for node in some for core in node] for some in _blocks(topology, n)]
    else:
        # One rank for each NUMA node, then the next rank where the most cores per rank remain.
        ranks = [1] * len(topology)
        for _ in range(n - len(topology)):
            room = [len(node) / (count + 1) for node, count in zip(topology, ranks, strict=True)]
            ranks[room.index(max(room))] += 1
        groups = [
            list(block)
            for node, count in zip(topology, ranks, strict=True)
            for block in _blocks(node, count)
        ]
    return tuple(tuple(sorted(cpu for core in group for cpu in core)) for group in groups)


def _blocks(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split `items` into `count` contiguous parts whose lengths differ by at most one."""
    edges = [len(items) * k // count for k in range(count + 1)]
    return [items[low:high] for low, high in itertools.pairwise(edges)]
