"""CPU affinity of each local rank, from the cores of the node; pure."""

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

#: Set in each worker that keeps to processors of its own, to their list.
PROCESSORS = "LOCKSTEP_PROCESSORS"


def variables(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    local_ranks: range,
    local_size: int,
) -> tuple[dict[str, str], ...]:
    """Return the variables by which the ranks that are started here are bound.

    Raises:
        UsageError: if they cannot be bound.
    """
    if spec.settings.value("bind", environ) in (None, "none"):
        return ({},) * len(local_ranks)
    found = shares(machine.topology, local_size)
    # The threads of a run follow from the cores of the node, not from a rank's part of them.
    shared = {CORES: str(machine.cores)}
    return tuple({PROCESSORS: show_list(found[rank]), **shared} for rank in local_ranks)


def shares(topology: Topology, n: int) -> tuple[Core, ...]:
    """Return the processors of each of `n` ranks: disjoint, whole cores, and neighbours.

    No share has cores of two NUMA nodes where there are at least as many ranks as nodes; else each
    has whole nodes.

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
        # Each node gets a rank at least, and the next where most cores are left for it.
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
    """Split `items` into `count` runs whose lengths differ by at most one."""
    edges = [len(items) * k // count for k in range(count + 1)]
    return [items[low:high] for low, high in itertools.pairwise(edges)]
