"""Cores that a process may use: affinity and cgroup quota.

A core is a physical one. Two hardware threads of a core share its arithmetic units, which are what
training needs; a second intra-op thread there waits for the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.world.cgroups import cpu_quota

if TYPE_CHECKING:
    from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous

_SYSTEM = Path("/sys/devices/system")

#: The processors of one core, its hardware threads; the cores of one NUMA node; the nodes.
Core = tuple[int, ...]
Topology = tuple[tuple[Core, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Cores and processor time that one process may use."""

    #: Each core by the smallest number among its processors.
    cores: tuple[int, ...]
    #: How many cores' time the cgroups allow; `None` for no limit.
    quota: float | None = None

    @staticmethod
    def here() -> Share:
        """Return the share of this process."""
        cores = {_siblings(cpu)[0] for cpu in os.sched_getaffinity(0)}
        return Share(cores=tuple(sorted(cores)), quota=cpu_quota())


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by its cgroups' quota.

    A quota is rounded down: a thread more than it pays for makes all of them stop, in every period of
    the scheduler, and they wait for each other.
    """
    return count((Share.here(),))


def count(shares: Iterable[Share]) -> int:
    """Return how many cores the processes of one host may use together.

    Launchers may give each process cores of its own, or all of them the same.
    """
    shares = tuple(shares)
    cores = len({core for share in shares for core in share.cores})
    quotas = [share.quota for share in shares if share.quota is not None]
    limit = int(max(quotas)) if len(quotas) == len(shares) else cores
    return max(1, min(cores, limit))


def shared_cores(rendezvous: RankRendezvous) -> int:
    """Return how many cores the ranks on the main rank's node may use together; all ranks call it.

    Unlike `usable_cores()`, it doesn't depend on whether the launcher bound each rank to a part of them, as
    `mpiexec` and Slurm do.

    Raises:
        PeerError: if a rank cannot continue.
    """
    world, store = rendezvous.world, rendezvous.store
    store.set(f"cores/{world.node_rank}/{world.local_rank}", json.dumps(asdict(Share.here())))
    keys = [f"cores/{world.node_rank}/{other}" for other in range(world.local_size)]

    def counted() -> str:
        rendezvous.wait(keys, "begin")
        return str(count(Share(**json.loads(store.get(key))) for key in keys))

    return int(rendezvous.broadcast("cores", counted, "begin"))


def topology(allowed: Iterable[int] | None = None) -> Topology:
    """Return the cores of the allowed processors, by NUMA node, all in order of their numbers.

    By default these are the processors that this process may run on.
    """
    nodes: dict[int, dict[int, list[int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0) if allowed is None else allowed):
        links = (_SYSTEM / "cpu" / f"cpu{cpu}").glob("node[0-9]*")
        node = min((int(link.name.removeprefix("node")) for link in links), default=0)
        nodes.setdefault(node, {}).setdefault(_siblings(cpu)[0], []).append(cpu)
    return tuple(tuple(map(tuple, cores.values())) for _, cores in sorted(nodes.items()))


def _siblings(cpu: int) -> list[int]:
    """Return the processors of the core that `cpu` belongs to; itself, where the system does not say."""
    directory = _SYSTEM / "cpu" / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second on kernels before 5.5
        try:
            return parse_list((directory / name).read_text()) or [cpu]
        except (OSError, ValueError):
            continue
    return [cpu]


def parse_list(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,8`, as the kernel writes sets of processors."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(found)


def show_list(cpus: Iterable[int]) -> str:
    """Return the list that `parse_list` reads, as short as it can be written."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
