"""`check_connectivity`: every node connects to every other node, before ranks use collectives.

The members of the check, one process per node, share a store already; collectives also need connections
between all pairs of nodes. Each member listens, and sends a token to each connection: an address such as
Docker's 172.17.0.1 exists on many hosts.

First, all members try to connect to each interface of member 0. The interface on a member's route to member
0 becomes that member's interface, unless the user chose one. Then all pairs of members try these
interfaces; of more than `_ALL_PAIRS` members, each tries only the members whose index differs by 1, 2, 4,
8, … from its own. All members get the same result: an interface and address for each member, or an error
that lists the pairs without a connection.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import UnreachableError, UsageError
from lockstep.world.network import (
    Interface,
    first_addresses,
    interface_towards,
    interfaces,
    is_loopback,
    listen,
    named,
    why_unreached,
)
from lockstep.world.rendezvous.decode import decode
from lockstep.world.rendezvous.members import Members
from lockstep.world.rendezvous.port_discovery import Announcer, receive
from lockstep.world.waiting import Check, go_on

if TYPE_CHECKING:
    import torch.distributed as dist

#: Timeout in seconds of the first attempts at member 0; a second, longer attempt follows only if no
#: interface of member 0 is reached by all members.
_QUICK = 0.5
#: Maximum number of simultaneous connection attempts.
_AT_ONCE = 64
#: Maximum number of members of which all pairs are tried: member 0 reads the result of each attempt.
_ALL_PAIRS = 128
#: Maximum number of interfaces of a member that are tried; hosts with more have them for containers.
_MOST_OFFERS = 8
_MOST_PAIRS = 6
#: Seconds by which clocks of nodes may differ without a warning; records are ordered by clock.
CLOCK_TOLERANCE = 2.0
#: Beginnings of the names of bridges and tunnels of containers and virtual machines.
_VIRTUAL = (
    *("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "vxlan", "weave", "cilium"),
    *("kube", "nodelocal", "lxc", "lxdbr", "podman", "vmnet", "vboxnet", "tun", "tap", "dummy"),
)
_HINT = (
    "--interface NAME (or LOCKSTEP_INTERFACE) chooses another interface on a node; look for a firewall "
    "between the two; containers on several hosts need an overlay network or the host's: "
    "docs/manual/several-machines.md"
)


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """Port and interfaces at which a member listens during the check, and the member's token.

    Attributes:
        token: text that the member sends to each connection, so that others recognize it.
        offers: the member's interfaces, physical ones first; or only the one that the user chose.
    """

    token: str
    port: int
    offers: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Result of one attempt of a member to connect to another member.

    Attributes:
        member: index of the other member.
        place: interface and address of the other member that were tried.
        source: own interface on the route to that address; `None` without a route.
        failure: reason of the failure; empty after success.
    """

    member: int
    place: Interface
    source: Interface | None
    failure: str


Report = Sequence[Attempt]


def offers(own: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return the interfaces in `own`, each with its first address, which Gloo uses.

    Physical interfaces come first; at most `_MOST_OFFERS` interfaces are returned.
    """
    each = first_addresses(own)
    ranked = sorted(each, key=lambda it: (it.loopback, it.name.startswith(_VIRTUAL)))
    return tuple(ranked[:_MOST_OFFERS])


def partners(index: int, count: int) -> list[int]:
    """Return the indices of the members to which member `index` of `count` members tries to connect.

    Up to `_ALL_PAIRS` members, these are all others. Of more members, they are those at distances of 1, 2,
    4, … in both directions around the ring of members. Both members of a pair try to connect.
    """
    if count <= _ALL_PAIRS:
        return [member for member in range(count) if member != index]
    distances = [1 << power for power in range((count - 1).bit_length())]
    found = {(index + sign * distance) % count for distance in distances for sign in (1, -1)}
    return sorted(found - {index})


def check_connectivity(
    store: dist.Store,
    *,
    index: int,
    labels: Sequence[str],
    interface: str | None = None,
    seconds: float = 3.0,
    patience: float = 30.0,
    check: Check = go_on,
    warn: Callable[[str], None] | None = None,
) -> tuple[Interface, ...]:
    """Return, for each member, the interface and address at which all other members can connect to it.

    All members (one process per node) call this function together.

    Args:
        store: a store for this check alone.
        index: number of this member, from 0.
        labels: names of the members, by index, in messages.
        interface: interface of this member that the user chose; by default it is found.
        seconds: timeout of one connection attempt.
        patience: seconds that a member may delay the others.
        check: called repeatedly during waits; may raise to end them.
        warn: called on member 0 with a text if clocks of members differ; by default it prints
            the text to standard error.

    Raises:
        UnreachableError: the same on all members, if two cannot connect to each other, or one is
            missing.
        UsageError: if `interface` does not exist; other members get an `UnreachableError`.
    """
    members = Members(store, index, labels, kind=UnreachableError, hint=_HINT, check=check)
    listener = listen(0, loopback=False)
    token = secrets.token_hex(16)
    with Announcer(listener, {"token": token}):
        member = _Member(members, seconds, patience, warn or _warn)
        member.introduce(token, listener.getsockname()[1], interface)
        return member.connect(time.time())


class _Member:
    """This process as a member of the check: it tries to connect to the other members."""

    def __init__(
        self, members: Members, seconds: float, patience: float, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._members, self._index, self._labels = members, members.index, members.labels
        self._seconds, self._patience = seconds, patience
        self._own = interfaces()
        #: The `ProbeTarget`s of all members, by index.
        self._cards: list[ProbeTarget] = []

    def introduce(self, token: str, port: int, interface: str | None) -> None:
        """Send this member's `ProbeTarget` to all members, and receive theirs.

        `token` and `port` are fields of this member's `ProbeTarget`. `interface` is the interface that the
        user chose, if any.

        Raises:
            UsageError: if `interface` does not exist or has no address.
            UnreachableError: if another member is missing, or its user chose an invalid interface.
        """
        wrong: UsageError | None = None
        try:
            offered = offers(self._own if interface is None else (named(interface),))
            own: dict[str, Any] = asdict(ProbeTarget(token, port, offered))
        except UsageError as error:
            wrong, own = error, {"error": error.message}

        def answer(values: list[Any]) -> Any:
            self._check_here(values, "met the others, but did not come to try the network")
            for label, value in zip(self._labels, values, strict=True):
                if "error" in value:
                    raise UnreachableError(f"{label}: {value['error']}", hint=_HINT)
                decode(ProbeTarget, value)
            return values

        try:
            found = self._members.ask("cards", own, answer, self._patience)
        except UnreachableError:
            if wrong is not None:
                raise wrong from None
            raise
        self._cards = [decode(ProbeTarget, value) for value in found]

    def connect(self, now: float) -> tuple[Interface, ...]:
        """Try to connect to member 0, then to all others; return interface and address of each member.

        `now` is the time on this member's clock, which member 0 compares with the clocks of the others.

        Raises:
            UnreachableError: the same on all members, if two cannot connect to each other.
        """
        first = [] if self._index == 0 else [(0, place) for place in self._cards[0].offers]
        for look, seconds in enumerate((min(_QUICK, self._seconds), self._seconds)):
            report = self._try(first, seconds)
            own = [now, [asdict(attempt) for attempt in report]]
            places = self._places(f"first/{look}", own, seconds, last=look == 1)
            if places:
                break
        others = [
            (member, place)
            for member in partners(self._index, len(self._cards))
            for place in places[member]
            if member != 0
        ]
        report += self._try(others, self._seconds)
        found = self._members.ask(
            "pairs",
            [asdict(attempt) for attempt in report],
            lambda values: self._result(places, values),
            self._seconds * math.ceil(max(1, len(others)) / _AT_ONCE) + self._patience,
        )
        return tuple(Interface(*place) for place in found)

    def _places(
        self, question: str, own: Any, seconds: float, *, last: bool
    ) -> list[list[Interface]]:
        """Return the addresses to try next, by member, after all members have tried to reach member 0.

        Member 0 computes the result for all members by `choose`. `own` is this member's clock and its
        attempts. `question` is a key of the store for this exchange, in which a member may take `seconds`.

        If no address of member 0 was reached by all members, the result is empty, unless this was the
        `last` attempt.
        """

        def answer(values: list[Any]) -> Any:
            self._check_here(values, "left while the network was tried,")
            reports = [[decode(Attempt, attempt) for attempt in report] for _, report in values]
            places = choose(self._cards, reports)
            first = places[0][:1]
            if not last and not all(
                any(attempt.place in first and not attempt.failure for attempt in report)
                for report in reports[1:]
            ):
                return []
            for text in _clock_problems(self._labels, [clock for clock, _ in values]):
                self._warn(text)
            return [[astuple(place) for place in there] for there in places]

        found = self._members.ask(question, own, answer, seconds + self._patience)
        return [[Interface(*place) for place in there] for there in found]

    def _result(
        self, places: Sequence[Sequence[Interface]], values: Sequence[Any]
    ) -> list[tuple[str, str]]:
        self._check_here(values, "left while the network was tried,")
        reports = [[decode(Attempt, attempt) for attempt in report] for report in values]
        found = problem(self._cards, reports, self._labels)
        if found:
            raise UnreachableError(found, hint=_HINT)
        if len(places[0]) != 1:
            lines = [
                f"no interface of {self._labels[0]} is reached by all others; expected one that is:"
            ]
            for label, report in zip(self._labels[1:], reports[1:], strict=True):
                at = [
                    str(attempt.place)
                    for attempt in report
                    if attempt.member == 0 and not attempt.failure
                ]
                lines.append(f"  {label} reaches {', '.join(at)}")
            raise UnreachableError("\n".join(lines), hint=_HINT)
        return [astuple(there[0]) for there in places]

    def _check_here(self, values: Sequence[Any], what: str) -> None:
        missing = [label for label, one in zip(self._labels, values, strict=True) if one is None]
        if missing:
            raise UnreachableError(
                f"{', '.join(missing)} {what} within {self._patience:g} s; "
                f"expected all {len(values)} nodes",
                hint=_HINT,
            )

    def _try(self, targets: Sequence[tuple[int, Interface]], seconds: float) -> list[Attempt]:
        """Try to connect to all `targets`, `_AT_ONCE` at a time, with a timeout of `seconds` each.

        A target is the index of a member and one of its interfaces.
        """

        def attempt(target: tuple[int, Interface]) -> Attempt:
            member, place = target
            source = interface_towards(place.address, self._own)
            failure = _connect(self._cards[member], place, seconds)
            if failure and any(own.address == place.address for own in self._own):
                failure = f"{self._labels[self._index]} has that address itself"
            return Attempt(member, place, source, failure)

        with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(targets)))) as pool:
            return list(pool.map(attempt, targets))


def _connect(card: ProbeTarget, place: Interface, seconds: float) -> str:
    """Connect to a member at `place`, one of its addresses; return the reason of a failure, or `""`.

    `card` has the port and the token of this member. An answer without this token is a failure.
    """
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((place.address, card.port), timeout=seconds) as connection:
            message = receive(connection, deadline)
    except OSError as error:
        return why_unreached(error)
    except ValueError:
        return "answered by something else than Lockstep"
    return "" if message.get("token") == card.token else "answered by another launch"


def choose(cards: Sequence[ProbeTarget], reports: Sequence[Report]) -> list[list[Interface]]:
    """Return the addresses to try next, by member, after all members have tried to reach member 0.

    `cards` are the `ProbeTarget`s of all members, by index; `reports` are their attempts to reach member 0.
    For member 0, the result is its first interface that all others have reached, or all of its interfaces
    if there is none. For another member, the result is the interface on that member's route to member 0, or
    the member's first interface if it offers only one or its route is unknown.
    """
    reached = [
        {attempt.place: attempt.source for attempt in report if not attempt.failure}
        for report in reports
    ]
    common = [place for place in cards[0].offers if all(place in ways for ways in reached[1:])]
    places = [common[:1] or list(cards[0].offers)]
    for card, ways in zip(cards[1:], reached[1:], strict=True):
        source = next((ways[place] for place in places[0] if place in ways), None)
        if len(card.offers) > 1 and source is not None:
            places.append([source])
        else:
            places.append(list(card.offers[:1]))
    return places


def problem(cards: Sequence[ProbeTarget], reports: Sequence[Report], labels: Sequence[str]) -> str:
    """Return a message that lists the pairs of members without a connection; empty if there are none.

    By index of the member, `cards` are the `ProbeTarget`s, `reports` are the attempts to connect to others,
    and `labels` are the names in the message.
    """
    reached = {
        (by, attempt.member)
        for by, report in enumerate(reports)
        for attempt in report
        if not attempt.failure
    }
    unreached = {
        (by, attempt.member) for by, report in enumerate(reports) for attempt in report
    } - reached
    pairs = sorted({tuple(sorted(pair)) for pair in unreached})

    def ways(by: int, to: int) -> list[str]:
        """Return a line for each attempt of member `by` to connect to member `to`."""
        tried = [attempt for attempt in reports[by] if attempt.member == to]
        beyond = [attempt for attempt in tried if not is_loopback(attempt.place.address)]
        return [
            f"  {labels[by]} from {attempt.source or 'no interface'} to {attempt.place} "
            f"port {cards[to].port}: {attempt.failure}"
            for attempt in beyond or tried
        ]

    lines: list[str] = []
    for low, high in pairs[:_MOST_PAIRS]:
        both = [pair for pair in ((low, high), (high, low)) if pair in unreached]
        by, to = (labels[member] for member in both[0])
        each = f"{by} and {to} cannot reach each other:"
        lines.append(
            each if len(both) == 2 else f"{by} cannot reach {to}, though {to} reaches {by}:"
        )
        lines += [line for pair in both for line in ways(*pair)]
    if len(pairs) > _MOST_PAIRS:
        lines.append(f"and {len(pairs) - _MOST_PAIRS} more pairs")
    everywhere = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    if everywhere:
        lines.append(f"all of these pairs have {labels[everywhere.pop()]} in common")
    return "\n".join(lines)


def _clock_problems(labels: Sequence[str], clocks: Sequence[float]) -> Iterator[str]:
    for label, clock in zip(labels[1:], clocks[1:], strict=True):
        ahead = clock - clocks[0]
        if abs(ahead) > CLOCK_TOLERANCE:
            yield (
                f"the clock of {label} is {abs(ahead):.0f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {labels[0]}: "
                "times in records don't compare"
            )


def _warn(text: str) -> None:
    print(f"lockstep: warning: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for readers of records
