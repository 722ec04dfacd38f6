"""Physical CPU cores that a process may use, by its affinity and its cgroup quota.

Two hardware threads of a core share its arithmetic units, so that a second intra-op thread on the same core
does not make training faster.
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

#: `Core`: CPU numbers of a core's hardware threads. `Topology`: cores by NUMA node.
Core = tuple[int, ...]
Topology = tuple[tuple[Core, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShare:
    """CPU cores and CPU time that one process may use."""

    #: Smallest CPU number of each core.
    cores: tuple[int, ...]
    #: Number of CPUs whose time the cgroups allow; `None` for no limit.
    quota: float | None = None

    @staticmethod
    def here() -> CpuShare:
        """Return the cores and CPU time that this process may use."""
        cores = {_siblings(cpu)[0] for cpu in os.sched_getaffinity(0)}
        return CpuShare(cores=tuple(sorted(cores)), quota=cpu_quota())


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its cgroup quota.

    A fractional quota is rounded down: with one thread too many, the scheduler stops all threads in every
    period.
    """
    return count((CpuShare.here(),))


def count(shares: Iterable[CpuShare]) -> int:
    """Return the number of cores that the processes of one host with these `shares` may use together.

    Cores in several shares count once. If all shares have a quota, the largest quota is the limit. The
    result is at least 1.
    """
    shares = tuple(shares)
    cores = len({core for share in shares for core in share.cores})
    quotas = [share.quota for share in shares if share.quota is not None]
    limit = int(max(quotas)) if len(quotas) == len(shares) else cores
    return max(1, min(cores, limit))


def shared_cores(rendezvous: RankRendezvous) -> int:
    """Return the number of cores that the ranks on rank 0's node may use together; all ranks call this.

    Unlike `usable_cores()`, the result is the same if the launcher binds each rank to some of the cores, as
    `mpiexec` and Slurm do.

    Raises:
        PeerError: if another rank has failed.
    """
    world, store = rendezvous.world, rendezvous.store
    store.set(f"cores/{world.node_rank}/{world.local_rank}", json.dumps(asdict(CpuShare.here())))
    keys = [f"cores/{world.node_rank}/{other}" for other in range(world.local_size)]

    def counted() -> str:
        rendezvous.wait(keys, "begin")
        return str(count(CpuShare(**json.loads(store.get(key))) for key in keys))

    return int(rendezvous.broadcast("cores", counted, "begin"))


def topology(allowed: Iterable[int] | None = None) -> Topology:
    """Return the CPU numbers in `allowed`, grouped by core, and the cores grouped by NUMA node.

    All numbers are in ascending order. By default, `allowed` has all CPUs on which this process may run.
    """
    nodes: dict[int, dict[int, list[int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0) if allowed is None else allowed):
        links = (_SYSTEM / "cpu" / f"cpu{cpu}").glob("node[0-9]*")
        node = min((int(link.name.removeprefix("node")) for link in links), default=0)
        nodes.setdefault(node, {}).setdefault(_siblings(cpu)[0], []).append(cpu)
    return tuple(tuple(map(tuple, cores.values())) for _, cores in sorted(nodes.items()))


def _siblings(cpu: int) -> list[int]:
    """Return the numbers of the hardware threads on the core of CPU `cpu`; only `cpu` itself if unknown."""
    directory = _SYSTEM / "cpu" / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second on kernels before 5.5
        try:
            return parse_list((directory / name).read_text()) or [cpu]
        except (OSError, ValueError):
            continue
    return [cpu]


def parse_list(text: str) -> list[int]:
    """Parse a list of CPU numbers such as `0-3,8`, as the Linux kernel writes it."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(found)


def show_list(cpus: Iterable[int]) -> str:
    """Return the shortest text for which `parse_list` returns these CPU numbers."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
