"""The roll call: everybody who meets at a store says who it is, and rank 0 says whether that fits.

It finds who shares a host, and names ranks that did not come, ranks that claim the same place, and
nodes whose libraries differ, before anything waits for them in a collective.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.errors import WorldError
from lockstep.world import host
from lockstep.world.model import World
from lockstep.world.waiting import Check, await_any, go_on

if TYPE_CHECKING:
    import torch.distributed as dist

#: How much longer the others wait for rank 0's answer than rank 0 waits for them.
_SLACK = timedelta(seconds=15)
_PAUSE = 0.005
#: How long rank 0 stays for others to read that the roll call failed.
_SEE_OFF_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is: its launcher said so, or the roll call found it."""

    local_rank: int
    local_size: int
    node_rank: int
    node_count: int

    @staticmethod
    def of(world: World) -> Place:
        """Return the place that `world` says."""
        return Place(
            local_rank=world.local_rank,
            local_size=world.local_size,
            node_rank=world.node_rank,
            node_count=world.node_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What one rank says of itself.

    Attributes:
        host: which host it is on, as `host.identity` has it.
        name: the host's name.
        pid: its process id.
        world: its number of ranks, or `None` where nobody counted before.
        place: where its launcher said that it is, if it did.
        versions: of what the bits depend on.
    """

    host: str
    name: str
    pid: int
    world: int
    place: Place | None
    versions: Mapping[str, str]

    @staticmethod
    def of(world: World, pid: int) -> Card:
        """Return the card of the rank that `world` describes."""
        return Card(
            host=host.identity(),
            name=host.name(),
            pid=pid,
            world=world.size,
            place=Place.of(world) if world.placed else None,
            versions=host.versions(),
        )

    @staticmethod
    def of_launcher(count: int, pid: int) -> Card:
        """Return the card of one of `count` launchers: where they are follows from their hosts."""
        return Card(
            host=host.identity(),
            name=host.name(),
            pid=pid,
            world=count,
            place=None,
            versions=host.versions(),
        )


def call(
    store: dist.Store,
    rank: int,
    card: Card,
    timeout: timedelta,
    what: str = "rank",
    check: Check = go_on,
) -> Place:
    """Hear all ranks; return the place of this one.

    Args:
        store: a store that all ranks reach, used for this alone.
        rank: this rank; rank 0 decides for all.
        card: what this rank says of itself.
        timeout: how long ranks may take to come.
        what: what is called: ranks, or the launchers of nodes.
        check: called again and again meanwhile; may raise to end it.

    Raises:
        WorldError: on every rank the same, if what the ranks say does not fit together.
    """
    if store.add(f"claim/{rank}", 1) > 1:
        _fail(store, _claimed_twice(store, rank, card, what))
    store.set(f"card/{rank}", json.dumps(asdict(card)))
    if rank == 0:
        _decide(store, card.world, timeout, what, check)
    answer = _answer(store, timeout, what, check)
    if "error" in answer:
        _see_off(store, rank, card.world)
        raise WorldError(answer["error"], hint=answer["hint"])
    found = answer["places"]
    if rank >= len(found):
        raise WorldError(
            f"{what} {rank} on {card.name} is in a world of {card.world}, {what} 0 in a world of "
            f"{len(found)}; expected the same",
            hint=_HINTS["sizes"],
        )
    return Place(**found[rank])


def cancel(store: dist.Store, error: WorldError, came: int) -> None:
    """Tell those who came, and wait in the roll call, that somebody else did not.

    Args:
        store: the one of the roll call.
        error: what all of them are to hear.
        came: how many they are.
    """
    _post(store, error=error.message, hint=error.hint or _HINTS["missing"])
    _await_heard(store, came)


def _decide(store: dist.Store, size: int, timeout: timedelta, what: str, check: Check) -> None:
    keys = [f"card/{rank}" for rank in range(size)]
    if await_any(store, [["answer"], keys], timeout.total_seconds(), check) == 0:
        return  # a rank that came twice has given it
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        _post(store, error=_missing(size, missing, timeout, what), hint=_HINTS["missing"])
        return
    cards = [read(store, rank) for rank in range(size)]
    problem = problem_with(cards, what)
    if problem is not None:
        _post(store, error=problem[0], hint=problem[1])
    else:
        _post(store, places=[asdict(place) for place in places(cards)])


def places(cards: Sequence[Card]) -> list[Place]:
    """Return the place of each rank: what launchers said, and else what follows from the hosts."""
    nodes = {name: number for number, name in enumerate(dict.fromkeys(card.host for card in cards))}
    sizes = Counter(card.host for card in cards)
    seen: Counter[str] = Counter()
    found = []
    for card in cards:
        by_host = Place(
            local_rank=seen[card.host],
            local_size=sizes[card.host],
            node_rank=nodes[card.host],
            node_count=len(nodes),
        )
        seen[card.host] += 1
        found.append(card.place or by_host)
    return found


def problem_with(cards: Sequence[Card], what: str = "rank") -> tuple[str, str] | None:
    """Return what does not fit together in `cards`, and a hint; `None` if all does."""
    return (
        _versions(cards, what)
        or _sizes(cards, what)
        or _no_place(cards)
        or _same_place(cards)
        or _local_sizes(cards)
    )


def _sizes(cards: Sequence[Card], what: str) -> tuple[str, str] | None:
    for rank, card in enumerate(cards):
        if card.world != cards[0].world:
            text = (
                f"{what} {rank} on {card.name} is in a world of {card.world}, {what} 0 on "
                f"{cards[0].name} in a world of {cards[0].world}; expected the same"
            )
            return text, _HINTS["sizes"]
    return None


def _versions(cards: Sequence[Card], what: str) -> tuple[str, str] | None:
    for rank, card in enumerate(cards):
        for library, version in cards[0].versions.items():
            if card.versions.get(library) != version:
                text = (
                    f"{what} {rank} on {card.name} has {library} {card.versions.get(library)}, "
                    f"{what} 0 on {cards[0].name} has {version}; expected the same on all nodes"
                )
                return text, _HINTS["versions"]
    return None


def _no_place(cards: Sequence[Card]) -> tuple[str, str] | None:
    without = [rank for rank, card in enumerate(cards) if card.place is None]
    if len(without) in (0, len(cards)):
        return None
    text = (
        f"rank {without[0]} on {cards[without[0]].name} does not know its local rank, though others "
        "do; expected all to know theirs, or none"
    )
    return text, _HINTS["same place"]


def _same_place(cards: Sequence[Card]) -> tuple[str, str] | None:
    claims: dict[tuple[int, int], int] = {}
    hosts: dict[int, int] = {}
    for rank, card in enumerate(cards):
        if card.place is None:
            continue
        node, local = card.place.node_rank, card.place.local_rank
        other = claims.setdefault((node, local), rank)
        if other != rank:
            text = (
                f"ranks {other} and {rank} are both local rank {local} of node {node} "
                f"({cards[other].name}, {card.name}); expected a local rank of its own for each"
            )
            return text, _HINTS["same place"]
        first = hosts.setdefault(node, rank)
        if cards[first].host != card.host:
            text = (
                f"ranks {first} ({cards[first].name}) and {rank} ({card.name}) are both on node "
                f"{node}, but on different hosts; expected one host for each node"
            )
            return text, _HINTS["same place"]
    return None


def _local_sizes(cards: Sequence[Card]) -> tuple[str, str] | None:
    places = [card.place for card in cards if card.place is not None]
    there = Counter(place.node_rank for place in places)
    for rank, place in enumerate(places):
        if place.local_size != there[place.node_rank]:
            text = (
                f"rank {rank} on {cards[rank].name} is one of {place.local_size} on node "
                f"{place.node_rank}, and {there[place.node_rank]} have come from there"
            )
            return text, _HINTS["same place"]
    return None


_HINTS = {
    "missing": "look at their output: are they started, and can they reach this node?",
    "sizes": "start all ranks with one launcher, or with the same WORLD_SIZE",
    "versions": "the bits depend on it: install the same set on all nodes",
    "same place": "set LOCAL_RANK and LOCAL_WORLD_SIZE per process, or neither",
    "twice": "a stale file of an earlier run? Remove it. Else start each rank once",
}


def _claimed_twice(store: dist.Store, rank: int, card: Card, what: str) -> str:
    text = f"{what} {rank} has come twice: on {card.name}, process {card.pid}"
    if store.check([f"card/{rank}"]):
        other = read(store, rank)
        text += f", and on {other.name}, process {other.pid}"
    return text


def _fail(store: dist.Store, text: str) -> None:
    _post(store, error=text, hint=_HINTS["twice"])
    raise WorldError(text, hint=_HINTS["twice"])


def _post(store: dist.Store, **answer: Any) -> None:
    """Give the answer to all, unless one was given: all are to hear the same."""
    if store.add("answers", 1) == 1:
        store.set("answer", json.dumps(answer))


def _answer(store: dist.Store, timeout: timedelta, what: str, check: Check) -> dict[str, Any]:
    patience = timeout + _SLACK
    try:
        if await_any(store, [["answer"]], patience.total_seconds(), check) is None:
            why = f"did not answer within {patience.total_seconds():g} s"
            raise WorldError(f"{what} 0 {why}", hint=_HINTS["missing"])
        answer: dict[str, Any] = json.loads(store.get("answer"))
    except RuntimeError as error:
        why = f"is gone, or the store is: {str(error).partition(chr(10))[0]}"
        raise WorldError(f"{what} 0 {why}", hint=_HINTS["missing"]) from error
    return answer


def _see_off(store: dist.Store, rank: int, size: int) -> None:
    """Let rank 0, with whom the store may go, be the last to leave a roll call that has failed."""
    store.add("heard", 1)
    if rank != 0:
        return
    _await_heard(store, sum(store.check([f"card/{other}"]) for other in range(size)))


def _await_heard(store: dist.Store, came: int) -> None:
    deadline = time.monotonic() + _SEE_OFF_SECONDS
    while store.add("heard", 0) < came and time.monotonic() < deadline:
        time.sleep(_PAUSE)


def _missing(size: int, missing: Sequence[int], timeout: timedelta, what: str) -> str:
    names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {size} {what}s did not come within {timeout.total_seconds():g} s: "
        f"{what} {names}"
    )


def read(store: dist.Store, rank: int) -> Card:
    """Return what `rank` said of itself."""
    told = json.loads(store.get(f"card/{rank}"))
    place = Place(**told["place"]) if told.get("place") else None
    # Another version may say more, or less; that it is another one is told by its versions.
    known = {field.name: told.get(field.name) for field in fields(Card)}
    return Card(**{**known, "versions": told.get("versions") or {}, "place": place})


def came_once(store: dist.Store, rank: int) -> bool:
    """Return whether one process has come as `rank`, and no other one, not even in an earlier run."""
    return store.add(f"claim/{rank}", 0) == 1


def placed(world: World, place: Place) -> World:
    """Return `world` with the numbers that the roll call found."""
    return replace(world, placed=True, **asdict(place))
