"""From who reached whom at which interface to one interface for each member, or to what is wrong.

Pure: nothing here touches a network. What was read from one is checked while it is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.world.network import Interface

#: Interfaces that a member offers, at most; hosts with many have them for containers.
MOST_OFFERS = 8
_MOST_PAIRS = 6
_MOST_TEXT = 200
#: Beginnings of the names that bridges and tunnels of containers and virtual machines have.
_VIRTUAL = (
    *("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "vxlan", "weave", "cilium"),
    *("kube", "nodelocal", "lxc", "lxdbr", "podman", "vmnet", "vboxnet", "tun", "tap", "dummy"),
)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a member is reached by all others."""

    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class Card:
    """What a member says of itself.

    Attributes:
        token: what its listener answers.
        port: where it listens.
        offers: the interfaces at which the others may try, the better ones first.
    """

    token: str
    port: int
    offers: tuple[Interface, ...]

    def plain(self) -> dict[str, Any]:
        """Return the card as JSON has it."""
        offers = [[one.name, one.address, one.loopback] for one in self.offers]
        return {"token": self.token, "port": self.port, "offers": offers}

    @staticmethod
    def parse(told: Any) -> Card:
        """Read a card.

        Raises:
            ValueError: if it is none.
        """
        match told:
            case {"token": str(token), "port": int(port), "offers": [*offers]} if (
                len(token) <= _MOST_TEXT and 0 < port < 1 << 16 and len(offers) <= MOST_OFFERS
            ):
                return Card(token, port, tuple(map(_parse_offer, offers)))
        raise ValueError("no card")


def _parse_offer(told: Any) -> Interface:
    match told:
        case [str(name), str(address), bool(loopback)] if len(name) + len(address) <= _MOST_TEXT:
            return Interface(name, address, loopback)
    raise ValueError("no interface")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of a member's attempt to reach another.

    Attributes:
        member: the other.
        offer: which of its offers was tried.
        source: the own interface and address that the way there begins at; empty without a way.
        failure: why it was not reached; empty if it was.
    """

    member: int
    offer: int
    source: str
    failure: str

    def plain(self) -> list[Any]:
        """Return the attempt as JSON has it."""
        return [self.member, self.offer, self.source, self.failure]

    @staticmethod
    def parse(told: Any, cards: Sequence[Card]) -> Attempt:
        """Read an attempt.

        Raises:
            ValueError: if it is none, or not one at what `cards` offer.
        """
        match told:
            case [int(member), int(offer), str(source), str(failure)] if 0 <= member < len(
                cards
            ) and 0 <= offer < len(cards[member].offers):
                return Attempt(member, offer, source[:_MOST_TEXT], failure[:_MOST_TEXT])
        raise ValueError("no attempt")


Report = Sequence[Attempt]


def shown(one: Interface) -> str:
    """Return an interface in words: its name and its address."""
    return f"{one.name} {one.address}"


def offers(own: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return what a member with these interfaces offers: each one's first address, which Gloo takes."""
    first: dict[str, Interface] = {}
    for one in own:
        first.setdefault(one.name, one)
    return tuple(sorted(first.values(), key=_rank)[:MOST_OFFERS])


def _rank(one: Interface) -> int:
    return 2 if one.loopback else int(one.name.startswith(_VIRTUAL))


def choose(cards: Sequence[Card], reports: Sequence[Report]) -> tuple[Reach, ...] | None:
    """Return for each member where all who tried reach it; `None` if there is no such place for one."""
    chosen = []
    for member, card in enumerate(cards):
        common = _common(member, cards, reports)
        if not common:
            return None
        best = min(common, key=lambda offer: _preference(offer, card, reports[member]))
        chosen.append(Reach(card.offers[best].name, card.offers[best].address))
    return tuple(chosen)


def _preference(offer: int, card: Card, report: Report) -> tuple[bool, int, int]:
    """Order interfaces: loopback last, those that lead to most others first, then as offered."""
    one = card.offers[offer]
    led_to = {tried.member for tried in report if not tried.failure and tried.source == shown(one)}
    return one.loopback, -len(led_to), offer


def _common(member: int, cards: Sequence[Card], reports: Sequence[Report]) -> set[int]:
    found = set(range(len(cards[member].offers)))
    for report in reports:
        tried = [attempt for attempt in report if attempt.member == member]
        if tried:
            found &= {attempt.offer for attempt in tried if not attempt.failure}
    return found


def problem(cards: Sequence[Card], reports: Sequence[Report], labels: Sequence[str]) -> str:
    """Say why `choose` found nothing: which members cannot reach which, and how each way failed."""
    unreached = {(by, to) for by, report in enumerate(reports) for to in _unreached(report)}
    if not unreached:
        return "\n".join(_no_common(cards, reports, labels))
    pairs = sorted({tuple(sorted(pair)) for pair in unreached})
    lines = []
    for low, high in pairs[:_MOST_PAIRS]:
        both = [pair for pair in ((low, high), (high, low)) if pair in unreached]
        lines.append(_headline(both, reports, labels))
        lines += [line for by, to in both for line in _ways(by, to, cards, reports, labels)]
    if len(pairs) > _MOST_PAIRS:
        lines.append(f"and {len(pairs) - _MOST_PAIRS} more pairs")
    everywhere = set.intersection(*map(set, pairs))
    if len(pairs) > 1 and everywhere:
        lines.append(f"all of these pairs have {labels[everywhere.pop()]} in common")
    return "\n".join(lines)


def _unreached(report: Report) -> set[int]:
    reached = {attempt.member for attempt in report if not attempt.failure}
    return {attempt.member for attempt in report} - reached


def _headline(both: list[tuple[int, int]], reports: Sequence[Report], labels: Sequence[str]) -> str:
    by, to = both[0]
    if len(both) == 2:
        return f"{labels[by]} and {labels[to]} cannot reach each other:"
    back = any(attempt.member == by for attempt in reports[to])
    but = f", though {labels[to]} reaches {labels[by]}" if back else ""
    return f"{labels[by]} cannot reach {labels[to]}{but}:"


def _ways(
    by: int, to: int, cards: Sequence[Card], reports: Sequence[Report], labels: Sequence[str]
) -> list[str]:
    """Return a line for each way that one member tried to another; loopback only if there is no other."""
    port, there = cards[to].port, cards[to].offers
    tried = [attempt for attempt in reports[by] if attempt.member == to]
    telling = [attempt for attempt in tried if not there[attempt.offer].loopback] or tried
    return [
        f"  {labels[by]} from {one.source or 'no interface'} to {shown(there[one.offer])} "
        f"port {port}: {one.failure}"
        for one in telling
    ]


def _no_common(
    cards: Sequence[Card], reports: Sequence[Report], labels: Sequence[str]
) -> Iterable[str]:
    for member, card in enumerate(cards):
        if _common(member, cards, reports):
            continue
        yield f"no interface of {labels[member]} is reached by all others; expected one that is:"
        for by, report in enumerate(reports):
            at = [
                shown(card.offers[a.offer]) for a in report if a.member == member and not a.failure
            ]
            if at:
                yield f"  {labels[by]} reaches {', '.join(at)}"
