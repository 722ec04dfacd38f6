"""Membership check: rank 0 compares the ranks, hosts and versions of all.

It finds ranks that share a host, and names ranks that did not come, ranks that claim the same place, and
nodes whose libraries differ, before anything waits for them in a collective. What launchers say of their
nodes is compared by the same functions.
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
    """What a process says of the host that it is on.

    Attributes:
        host: which host, as `host.identity` has it.
        name: the host's name.
        pid: the process id.
        versions: of what the bits depend on.
    """

    host: str
    name: str
    pid: int
    versions: Mapping[str, str]

    @staticmethod
    def here(pid: int) -> NodeInfo:
        """Return what the process `pid` of this host says."""
        return NodeInfo(host=host.identity(), name=host.name(), pid=pid, versions=host.versions())

    def __str__(self) -> str:
        """Return where the process is."""
        return f"on {self.name}, process {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Where a rank is: its launcher said so, or the membership check found it."""

    local_rank: int
    local_size: int
    node_rank: int
    node_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank says of itself.

    Attributes:
        node: its host.
        world: its number of ranks.
        place: where its launcher said that it is, if it did.
    """

    node: NodeInfo
    world: int
    place: RankPlacement | None

    @staticmethod
    def of(world: World, pid: int) -> RankInfo:
        """Return what the rank that `world` describes says."""
        place = RankPlacement(**{name: getattr(world, name) for name in RankPlacement.__slots__})
        return RankInfo(
            node=NodeInfo.here(pid), world=world.size, place=place if world.placed else None
        )

    @staticmethod
    def parse(told: Mapping[str, Any]) -> RankInfo:
        """Read what `asdict` and JSON have made of one."""
        # Another version may say more, or less; that it is another one is told by its versions.
        node = {name: told["node"].get(name) for name in NodeInfo.__slots__}
        place = told.get("place")
        return RankInfo(
            node=NodeInfo(**node),
            world=told.get("world", 0),
            place=None if place is None else RankPlacement(**place),
        )


def check_members(
    store: dist.Store, world: World, own: RankInfo, seconds: float
) -> tuple[World, list[str]]:
    """Check that all ranks have come and fit together; return the world with its places.

    Args:
        store: a store that all ranks reach, used for this alone.
        world: rank and rendezvous of this process.
        own: what it says of itself.
        seconds: how long ranks may take to come.

    Returns:
        The complete world, and the names of its nodes.

    Raises:
        WorldError: on every rank the same, if what the ranks say does not fit together.
    """
    rank = world.rank
    labels = [f"rank {number}" for number in range(world.size)]
    members = Members(store, rank, labels, hint=HINTS["missing"])
    if store.add(f"claim/{rank}", 1) > 1:
        raise _claimed_twice(members, rank, own)

    def answer(told: list[Any]) -> Any:
        missing = [rank for rank, one in enumerate(told) if one is None]
        if missing:
            raise WorldError(
                missing_text("rank", missing, len(told), seconds), hint=HINTS["missing"]
            )
        infos = [RankInfo.parse(one) for one in told]
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
    """Return whether one process has come as `rank`, and no other one, not even in an earlier run."""
    return store.add(f"claim/{rank}", 0) == 1


def _claimed_twice(members: Members, rank: int, own: RankInfo) -> WorldError:
    other = members.read(_QUESTION, rank)
    text = f"rank {rank} has come twice: {own.node}"
    if other is not None:
        text += f", and {RankInfo.parse(other).node}"
    error = WorldError(text, hint=HINTS["twice"])
    members.refuse(_QUESTION, error)
    return error


def missing_text(what: str, missing: Sequence[int], count: int, seconds: float) -> str:
    """Return which ranks or nodes did not come."""
    names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return f"{len(missing)} of {count} {what}s did not come within {seconds:g} s: {what} {names}"


def node_numbers(hosts: Sequence[str]) -> list[int]:
    """Return the number of the node that each host is, in the order in which they first appear."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    return [numbers[name] for name in hosts]


def places(infos: Sequence[RankInfo]) -> list[RankPlacement]:
    """Return the place of each rank: what launchers said, and else what follows from the hosts."""
    hosts = [info.node.host for info in infos]
    nodes, sizes, seen = node_numbers(hosts), Counter(hosts), Counter[str]()
    found = []
    for info, node in zip(infos, nodes, strict=True):
        name = info.node.host
        by_host = RankPlacement(
            local_rank=seen[name],
            local_size=sizes[name],
            node_rank=node,
            node_count=len(sizes),
        )
        seen[name] += 1
        found.append(info.place or by_host)
    return found


def differing_versions(
    label: str, versions: Mapping[str, str], first: str, expected: Mapping[str, str]
) -> str | None:
    """Return which library `label` has in another version than `first`, in words."""
    for library, version in expected.items():
        if versions.get(library) != version:
            return (
                f"{label} has {library} {versions.get(library)}, {first} has {version}; "
                "expected the same on all nodes"
            )
    return None


def problems(infos: Sequence[RankInfo]) -> Iterator[tuple[str, str]]:
    """Yield what does not fit together in what ranks say, the causes first, each with its hint's name."""
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
