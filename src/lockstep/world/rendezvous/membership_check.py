"""`check_members`: rank 0 compares hosts and library versions of all ranks, before the first collective.

The check finds ranks on the same host, and reports missing ranks, ranks with the same local rank on a
node, and nodes with different library versions. Launchers of several nodes use the same comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.errors import WorldError
from lockstep.world import host
from lockstep.world.model import World
from lockstep.world.rendezvous.members import Members

if TYPE_CHECKING:
    import torch.distributed as dist

HINTS = {
    "missing": "look at their output: are they started, and can they reach this node?",
    "sizes": "start all ranks with one launcher, or with the same WORLD_SIZE",
    "versions": "the bits depend on it: install the same set on all nodes",
    "same place": "set LOCAL_RANK and LOCAL_WORLD_SIZE per process, or neither",
    "twice": "a stale file of an earlier run? Remove it. Else start each rank once",
}
_QUESTION = "members"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Host, process id and library versions of a process.

    Attributes:
        host: id of the host, from `host.identity`.
        name: name of the host.
        versions: versions of packages that may change the bits of a result.
    """

    host: str
    name: str
    pid: int
    versions: Mapping[str, str]

    @staticmethod
    def here(pid: int) -> NodeInfo:
        """Return host, process id and library versions of process `pid` on this host."""
        return NodeInfo(host=host.identity(), name=host.name(), pid=pid, versions=host.versions())

    def __str__(self) -> str:
        """Return host name and process id as text."""
        return f"on {self.name}, process {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Local rank and node rank of a process, number of local ranks, and number of nodes."""

    local_rank: int
    local_size: int
    node_rank: int
    node_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Node, world size and placement of a rank.

    Attributes:
        world: number of ranks.
        place: local and node rank given by the launcher; `None` if unknown.
    """

    node: NodeInfo
    world: int
    place: RankPlacement | None

    @staticmethod
    def of(world: World, pid: int) -> RankInfo:
        """Return the `RankInfo` of the rank that runs as process `pid` on this host.

        World size and placement are taken from `world`.
        """
        place = RankPlacement(**{name: getattr(world, name) for name in RankPlacement.__slots__})
        return RankInfo(
            node=NodeInfo.here(pid), world=world.size, place=place if world.placed else None
        )

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> RankInfo:
        """Return the `RankInfo` that the JSON object `fields` describes."""
        # Another version of Lockstep may have different fields; the comparison of versions reports it.
        node = {name: fields["node"].get(name) for name in NodeInfo.__slots__}
        place = fields.get("place")
        return RankInfo(
            node=NodeInfo(**node),
            world=fields.get("world", 0),
            place=None if place is None else RankPlacement(**place),
        )


def check_members(
    store: dist.Store, world: World, own: RankInfo, seconds: float
) -> tuple[World, list[str]]:
    """Check that all ranks join within `seconds`, with consistent placements and versions.

    All ranks call this function. `store` is a store for this check alone; `world` and `own` describe this
    rank.

    Returns:
        The world of this rank, with local and node rank, and the names of the nodes.

    Raises:
        WorldError: the same on every rank, if a rank is missing, or ranks contradict each other.
    """
    rank = world.rank
    labels = [f"rank {number}" for number in range(world.size)]
    members = Members(store, rank, labels, hint=HINTS["missing"])
    if store.add(f"claim/{rank}", 1) > 1:
        other = members.read(_QUESTION, rank)
        both = str(own.node) if other is None else f"{own.node}, and {RankInfo.parse(other).node}"
        error = WorldError(f"rank {rank} has come twice: {both}", hint=HINTS["twice"])
        members.refuse(_QUESTION, error)
        raise error

    def answer(values: list[Any]) -> Any:
        missing = [rank for rank, value in enumerate(values) if value is None]
        if missing:
            absent = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            raise WorldError(
                f"{len(missing)} of {len(values)} ranks did not come within {seconds:g} s: rank {absent}",
                hint=HINTS["missing"],
            )
        infos = [RankInfo.parse(value) for value in values]
        for text, hint in problems(infos):
            raise WorldError(text, hint=HINTS[hint])
        found = places(infos)
        on = {place.node_rank: info.node.name for place, info in zip(found, infos, strict=True)}
        names = [on.get(number, "no rank") for number in range(found[0].node_count)]
        return [asdict(place) for place in found], names

    found, names = members.ask(_QUESTION, asdict(own), answer, seconds)
    if rank >= len(found):
        raise WorldError(
            f"rank {rank} on {own.node.name} is in a world of {own.world}, rank 0 in a world of "
            f"{len(found)}; expected the same",
            hint=HINTS["sizes"],
        )
    return replace(world, placed=True, **found[rank]), names


def came_once(store: dist.Store, rank: int) -> bool:
    """Return whether exactly one process has called `check_members` as rank `rank` with this store."""
    return store.add(f"claim/{rank}", 0) == 1


def node_numbers(hosts: Sequence[str]) -> list[int]:
    """Return a node number for each item of `hosts`: equal ids of hosts get the same number.

    Numbers count from 0, in the order in which the hosts first appear.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    return [numbers[name] for name in hosts]


def places(infos: Sequence[RankInfo]) -> list[RankPlacement]:
    """Return the placement of each rank: set by its launcher, or else derived from the ranks' hosts."""
    hosts = [info.node.host for info in infos]
    sizes, seen, found = Counter(hosts), Counter[str](), []
    for info, host_name, node in zip(infos, hosts, node_numbers(hosts), strict=True):
        by_host = RankPlacement(
            local_rank=seen[host_name],
            local_size=sizes[host_name],
            node_rank=node,
            node_count=len(sizes),
        )
        seen[host_name] += 1
        found.append(info.place or by_host)
    return found


def differing_versions(
    label: str, versions: Mapping[str, str], first: str, expected: Mapping[str, str]
) -> str | None:
    """Return a message about the first library whose version is not as expected; `None` without one.

    `versions` are those of the process named `label`, by library; `expected` are those of the process named
    `first`.
    """
    for library, version in expected.items():
        if versions.get(library) != version:
            return (
                f"{label} has {library} {versions.get(library)}, {first} has {version}; "
                "expected the same on all nodes"
            )
    return None


def problems(infos: Sequence[RankInfo]) -> Iterator[tuple[str, str]]:
    """Yield each contradiction between the ranks in `infos`, as a message and a key of `HINTS`."""
    labels = [f"rank {rank} on {info.node.name}" for rank, info in enumerate(infos)]
    first = infos[0]
    for label, info in zip(labels, infos, strict=True):
        found = differing_versions(label, info.node.versions, labels[0], first.node.versions)
        if found:
            yield found, "versions"
    for label, info in zip(labels, infos, strict=True):
        if info.world != first.world:
            text = f"{label} is in a world of {info.world}, {labels[0]} in a world of {first.world}"
            yield f"{text}; expected the same", "sizes"
    for text in _wrong_places(labels, infos):
        yield text, "same place"


def _wrong_places(labels: Sequence[str], infos: Sequence[RankInfo]) -> Iterator[str]:
    placed = [(rank, info, info.place) for rank, info in enumerate(infos) if info.place is not None]
    without = [label for label, info in zip(labels, infos, strict=True) if info.place is None]
    if without and placed:
        yield (
            f"{without[0]} does not know its local rank, though others do; "
            "expected all to know theirs, or none"
        )
    there = Counter(place.node_rank for _, _, place in placed)
    claims: dict[tuple[int, int], int] = {}
    firsts: dict[int, int] = {}
    for rank, info, place in placed:
        node = place.node_rank
        other = claims.setdefault((node, place.local_rank), rank)
        if other != rank:
            yield (
                f"ranks {other} and {rank} are both local rank {place.local_rank} of node {node} "
                f"({infos[other].node.name}, {info.node.name}); expected a local rank of its own for each"
            )
        one = firsts.setdefault(node, rank)
        if infos[one].node.host != info.node.host:
            yield (
                f"ranks {one} ({infos[one].node.name}) and {rank} ({info.node.name}) are both on node "
                f"{node}, but on different hosts; expected one host for each node"
            )
    for rank, _, place in placed:
        if place.local_size != there[place.node_rank]:
            yield (
                f"{labels[rank]} is one of {place.local_size} on node {place.node_rank}, "
                f"and {there[place.node_rank]} have come from there"
            )
