"""Connectivity check: every node connects to every other one, before any rank waits for it.

The members share a store already; collectives need connections between them, too.
Each listens, and sends a token: 172.17.0.1 exists on every host with Docker, and would answer for the
wrong one. All try the interfaces of member 0. The interface by which a member reaches it is the
member's, unless the user chose one; then all pairs are tried at these. The answer is the same for all:
an interface and an address for each member, or which pairs cannot reach each other, and how that failed.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import UnreachableError, UsageError
from lockstep.world.network import (
    Interface,
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

#: Seconds of a first look at member 0, which is enough unless a way fails: an interface that leads nowhere
#: would otherwise cost every launch the time until it is given up.
_QUICK = 0.5
#: Connections that are tried at the same time.
_AT_ONCE = 64
#: Interfaces that member 0 offers, at most; hosts with many have them for containers.
_MOST_OFFERS = 8
_MOST_PAIRS = 6
#: A difference of clocks that makes the order of events in records misleading, in seconds.
CLOCK_TOLERANCE = 2.0
#: Beginnings of the names that bridges and tunnels of containers and virtual machines have.
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
class Reach:
    """Interface and address at which all others reach a member."""

    interface: str
    address: str

    def __str__(self) -> str:
        """Return interface and address."""
        return f"{self.interface} {self.address}"


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """Where a member listens, and the token that its listener sends.

    Attributes:
        offers: its interfaces, the better ones first; the one that the user chose.
    """

    token: str
    port: int
    offers: tuple[Reach, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of an attempt to reach another member.

    Attributes:
        source: the own interface that leads there; `None` without a route.
        failure: why it was not reached; empty if it was.
    """

    member: int
    place: Reach
    source: Reach | None
    failure: str


Report = Sequence[Attempt]


def offers(own: Iterable[Interface]) -> tuple[Reach, ...]:
    """Return the addresses of a member with these interfaces: the first of each, which Gloo takes."""
    first: dict[str, Interface] = {}
    for interface in own:
        first.setdefault(interface.name, interface)
    ranked = sorted(first.values(), key=lambda it: (it.loopback, it.name.startswith(_VIRTUAL)))
    return tuple(Reach(interface.name, interface.address) for interface in ranked[:_MOST_OFFERS])


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
) -> tuple[Reach, ...]:
    """Return for each member the interface and address at which all others reach it.

    All members call it, with a store for this alone, and the same labels for messages. An attempt takes
    `seconds` at the most; a member may keep the others waiting for `patience` seconds. `check` is called
    again and again meanwhile; it may raise to end the wait. Member 0 also warns, by default on standard
    error, where another member's clock differs: records are read by them.

    Raises:
        UnreachableError: on every member the same, if two cannot reach each other, or one did not come.
        UsageError: if this member has no such interface; on the others it is an `UnreachableError`.
    """
    members = Members(store, index, labels, kind=UnreachableError, hint=_HINT, check=check)
    listener = listen(0, loopback=False)
    token = secrets.token_hex(16)
    with Announcer(listener, {"token": token}):
        member = _Member(members, seconds, patience, warn or _warn)
        cards = member.introduce(token, listener.getsockname()[1], interface)
        return member.connect(cards, time.time())


class _Member:
    """The attempts and reports of one member."""

    def __init__(
        self, members: Members, seconds: float, patience: float, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._members, self._index, self._labels = members, members.index, members.labels
        self._seconds, self._patience = seconds, patience
        self._own = interfaces()

    def introduce(self, token: str, port: int, interface: str | None) -> list[ProbeTarget]:
        """Gather the listeners of all members; a wrong interface is an error on all of them."""
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
        return [decode(ProbeTarget, value) for value in found]

    def connect(self, cards: Sequence[ProbeTarget], now: float) -> tuple[Reach, ...]:
        """Try member 0, then all others; return where each is reached. `now` is this member's clock."""
        first = [] if self._index == 0 else [(0, place) for place in cards[0].offers]
        for look, seconds in enumerate((min(_QUICK, self._seconds), self._seconds)):
            report = self._try(cards, first, seconds)
            own = [now, [asdict(attempt) for attempt in report]]
            places = self._places(cards, f"first/{look}", own, seconds, last=look == 1)
            if places:
                break
        others = [
            (member, place)
            for member, there in enumerate(places)
            for place in there
            if member not in (0, self._index)
        ]
        report += self._try(cards, others, self._seconds)
        found = self._members.ask(
            "pairs",
            [asdict(attempt) for attempt in report],
            lambda values: self._result(cards, places, values),
            self._seconds * math.ceil(len(cards) / _AT_ONCE) + self._patience,
        )
        return tuple(Reach(*place) for place in found)

    def _places(
        self, cards: Sequence[ProbeTarget], question: str, own: Any, seconds: float, *, last: bool
    ) -> list[list[Reach]]:
        """Return the addresses at which to try each member; none, if member 0 is to be tried once more."""

        def answer(values: list[Any]) -> Any:
            self._check_here(values, "left while the network was tried,")
            reports = [[decode(Attempt, attempt) for attempt in report] for _, report in values]
            places = choose(cards, reports)
            first = places[0][:1]
            if not last and not all(
                any(attempt.place in first and not attempt.failure for attempt in report)
                for report in reports[1:]
            ):
                return []
            for text in _clock_problems(self._labels, [clock for clock, _ in values]):
                self._warn(text)
            return [[(place.interface, place.address) for place in there] for there in places]

        found = self._members.ask(question, own, answer, seconds + self._patience)
        return [[Reach(*place) for place in there] for there in found]

    def _result(
        self, cards: Sequence[ProbeTarget], places: Sequence[Sequence[Reach]], values: Sequence[Any]
    ) -> list[tuple[str, str]]:
        self._check_here(values, "left while the network was tried,")
        reports = [[decode(Attempt, attempt) for attempt in report] for report in values]
        found = problem(cards, reports, self._labels)
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
        return [(there[0].interface, there[0].address) for there in places]

    def _check_here(self, values: Sequence[Any], what: str) -> None:
        missing = [label for label, one in zip(self._labels, values, strict=True) if one is None]
        if missing:
            raise UnreachableError(
                f"{', '.join(missing)} {what} within {self._patience:g} s; "
                f"expected all {len(values)} nodes",
                hint=_HINT,
            )

    def _try(
        self, cards: Sequence[ProbeTarget], targets: Sequence[tuple[int, Reach]], seconds: float
    ) -> list[Attempt]:
        """Try all targets, `_AT_ONCE` at a time, for `seconds` each at the most."""

        def attempt(target: tuple[int, Reach]) -> Attempt:
            member, place = target
            leaving = interface_towards(place.address, self._own)
            failure = _connect(cards[member], place, seconds)
            if failure and any(own.address == place.address for own in self._own):
                failure = f"{self._labels[self._index]} has that address itself"
            source = None if leaving is None else Reach(leaving.name, leaving.address)
            return Attempt(member, place, source, failure)

        with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(targets)))) as pool:
            return list(pool.map(attempt, targets))


def _connect(card: ProbeTarget, place: Reach, seconds: float) -> str:
    """Connect to a member; return in words why it failed, or nothing."""
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((place.address, card.port), timeout=seconds) as connection:
            message = receive(connection, deadline)
    except OSError as error:
        return why_unreached(error)
    except ValueError:
        return "answered by something else than Lockstep"
    return "" if message.get("token") == card.token else "answered by another launch"


def choose(cards: Sequence[ProbeTarget], reports: Sequence[Report]) -> list[list[Reach]]:
    """Return the addresses at which to try each member, from the attempts of all others at member 0.

    Member 0 at its first interface that all reach; at all of them, if there is none. The others at the
    interface that leads there, or the only one that they offer.
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
    """Return which members cannot reach which, and how each way failed; nothing if all do."""
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
    lines: list[str] = []
    for low, high in pairs[:_MOST_PAIRS]:
        both = [pair for pair in ((low, high), (high, low)) if pair in unreached]
        by, to = (labels[member] for member in both[0])
        each = f"{by} and {to} cannot reach each other:"
        lines.append(
            each if len(both) == 2 else f"{by} cannot reach {to}, though {to} reaches {by}:"
        )
        lines += [line for pair in both for line in _ways(*pair, cards, reports, labels)]
    if len(pairs) > _MOST_PAIRS:
        lines.append(f"and {len(pairs) - _MOST_PAIRS} more pairs")
    everywhere = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    if everywhere:
        lines.append(f"all of these pairs have {labels[everywhere.pop()]} in common")
    return "\n".join(lines)


def _ways(
    by: int, to: int, cards: Sequence[ProbeTarget], reports: Sequence[Report], labels: Sequence[str]
) -> Iterator[str]:
    """Yield a line for each attempt of one member at another; loopback only if there is no other."""
    tried = [attempt for attempt in reports[by] if attempt.member == to]
    beyond = [attempt for attempt in tried if not is_loopback(attempt.place.address)]
    for attempt in beyond or tried:
        yield (
            f"  {labels[by]} from {attempt.source or 'no interface'} to {attempt.place} "
            f"port {cards[to].port}: {attempt.failure}"
        )


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
