"""Keys of the rendezvous store of launchers.

    launch, told/K      what the launch is; what launcher 0 tells all, once
    newest              number of the newest round, and its members; what follows is under round/N
    card/K, arrivals    launchers that have joined a round
    failed, heard       why the round cannot begin, and how many have read it
    place               where its launcher 0 listens
    loss/K, alive/K     a launcher has lost launcher 0; launcher 0 lives

Nothing in it beats, since a file only grows. Launcher 0 of a round knows the live launchers; one that has
lost launcher 0 asks it here, before there is another round: of two halves of a network, one continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.launch.nodes.membership import Launcher, NotNeeded
from lockstep.launch.nodes.server import Place
from lockstep.world.rendezvous.membership_check import NodeInfo
from lockstep.world.waiting import Check, await_any

#: How long a launcher that has to say something first may take.
_OPENING_SECONDS = 20.0
#: How long launcher 0, which looks twice a second, may take to say that it lives.
_ALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 2.0
#: How long the host of the store, which goes with it, stays for others to read why it leaves.
_LINGER_SECONDS = 3.0
_PAUSE = 0.01
#: Arrivals that may have died before they sent their card, in a row.
_GAP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a launcher says of itself when it arrives.

    Attributes:
        token: tells it from all others, for as long as it lives.
        node: its host.
        launcher: what it starts.
        round: the last round that it took part in; 0 for a newcomer.
        index: its number there; of a newcomer, what the user gave it.
        generation: number of the next generation, as far as it knows.
    """

    token: str
    node: NodeInfo
    launcher: Launcher
    round: int
    index: int
    generation: int

    @staticmethod
    def parse(told: dict[str, Any]) -> Card:
        """Read what `asdict` and JSON have made of one."""
        node, launcher = NodeInfo(**told["node"]), Launcher.parse(told["launcher"])
        return Card(**{**told, "node": node, "launcher": launcher})


class RendezvousKeys:
    """The rendezvous store of launchers.

    Args:
        store: one that all of them reach.
        check: called again and again while others are waited for.
    """

    def __init__(self, store: dist.Store, check: Check) -> None:
        self.store = store
        self.check = check
        self._heard: set[int] = set()

    def network(self, number: int) -> dist.Store:
        """Return a part of the store for the connectivity check of a round."""
        return dist.PrefixStore(f"round/{number}/network", self.store)

    def tell(self, key: str, value: Any) -> None:
        """Leave a note."""
        self.store.set(key, json.dumps(value))

    def has(self, key: str) -> bool:
        """Return whether there is a note."""
        return bool(self.store.check([key]))

    def read(self, key: str) -> Any:
        """Return a note that is there."""
        return json.loads(self.store.get(key))

    def hear(self, key: str, number: int, seconds: float) -> Any:
        """Return a note that launcher 0 of a round is to leave within `seconds`; `None` if it does not.

        Raises:
            WorldError: if the round cannot begin.
        """
        failed = f"round/{number}/failed"
        found = await_any(self.store, [[failed], [key]], seconds, self.check)
        self.check_failed(number)
        return None if found is None else self.read(key)

    # A round that cannot begin.

    def fail(self, number: int, error: WorldError) -> None:
        """Tell all that come to a round why it cannot begin; the first reason is told."""
        if self.store.add(f"round/{number}/failures", 1) == 1:
            self.tell(f"round/{number}/failed", [error.message, error.hint])
        self._count_heard(number)

    def check_failed(self, number: int) -> None:
        """Raise what was told of a round that cannot begin.

        Raises:
            WorldError: the same for all.
        """
        if self.has(f"round/{number}/failed"):
            message, hint = self.read(f"round/{number}/failed")
            self._count_heard(number)
            raise WorldError(message, hint=hint)

    def _count_heard(self, number: int) -> None:
        """Count this launcher, once, among those that know why a round cannot begin."""
        if number not in self._heard:
            self._heard.add(number)
            self.store.add(f"round/{number}/heard", 1)

    def linger(self, number: int) -> None:
        """Wait a moment until all that came to a round have read why it cannot begin."""
        heard, deadline = f"round/{number}/heard", time.monotonic() + _LINGER_SECONDS
        if not self.has(f"round/{number}/failed"):
            return
        while self.store.add(heard, 0) < self._coming(number) and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    def _coming(self, number: int) -> int:
        """Return how many are to read about a round; all of the launch are on their way to the first."""
        return self.arrived(number) if self.newest() else self.store.add("founders", 0)

    # The launch.

    def found(self, launch: dict[str, Any]) -> dict[str, Any]:
        """Say what the launch is, or return what another has said.

        Raises:
            WorldError: if the first one has left.
        """
        if self.store.add("founders", 1) == 1:
            self.tell("launch", launch)
        if await_any(self.store, [["launch"]], _OPENING_SECONDS, self.check) is None:
            raise WorldError("the first node has left before it said what it starts")
        told: dict[str, Any] = self.read("launch")
        return told

    def end(self) -> None:
        """Tell those that wait for a place that the launch is over."""
        self.tell("over", 1)

    def check_over(self) -> None:
        """Raise `NotNeeded` if the launch is over."""
        if self.has("over"):
            raise NotNeeded

    # Rounds.

    def newest(self) -> int:
        """Return the number of the newest round; 0 before the first."""
        return self._newest()[0]

    def _newest(self) -> tuple[int, list[dict[str, Any]], str]:
        """Return the number of the newest round, its cards, and both as they stand in the store."""
        if not self.has("newest"):
            return 0, [], ""
        text = self.store.get("newest").decode()
        number, cards = json.loads(text)
        return number, cards, text

    def arrive(self, number: int, card: Card) -> None:
        """Come to a round."""
        arrival = self.store.add(f"round/{number}/arrivals", 1) - 1
        self.tell(f"round/{number}/card/{arrival}", asdict(card))

    def arrived(self, number: int) -> int:
        """Return how many have come to a round; some may have died before they sent their card."""
        key = f"round/{number}/arrivals"
        return int(self.store.get(key)) if self.has(key) else 0

    def cards(self, number: int, known: Sequence[Card] = ()) -> list[Card]:
        """Return the cards of all that have come to a round; `known` are those that were read before."""
        cards = list(known)
        seen = {card.token for card in cards}
        gap, arrival = 0, len(cards)
        while gap < _GAP:
            key = f"round/{number}/card/{arrival}"
            arrival += 1
            if not self.has(key):
                gap += 1
                continue
            gap, card = 0, Card.parse(self.read(key))
            if card.token not in seen:
                seen.add(card.token)
                cards.append(card)
        return cards

    def may_close(self, number: int) -> bool:
        """Return whether this launcher, and no other, is to close a round; asked once."""
        return bool(self.store.add(f"round/{number}/closing", 1) == 1)

    def close(self, number: int, cards: Sequence[Card]) -> None:
        """Begin a round with these launchers, unless a newer one has begun.

        One write has its begin and its members: a launcher that dies here leaves the whole of it
        or nothing, and one that was stopped for a while does not undo what others have done since.
        """
        newest, _, before = self._newest()
        if newest < number:
            text = json.dumps([number, [asdict(card) for card in cards]])
            self.store.compare_set("newest", before, text)

    def closed(self, number: int) -> tuple[Card, ...] | None:
        """Return the launchers of a round, once it has begun; none of one that is over."""
        newest, cards, _ = self._newest()
        if newest < number:
            return None
        return tuple(Card.parse(one) for one in cards) if newest == number else ()

    # Launcher 0 of a round.

    def tell_place(self, number: int, addresses: Sequence[str], place: Place) -> None:
        """Say where launcher 0 of a round listens, and at which addresses it may be reached."""
        self.tell(f"round/{number}/place", [list(addresses), asdict(place)])

    def reaches(self, number: int) -> bool:
        """Return whether launcher 0 of a round answers this launcher on the network."""
        key = f"round/{number}/place"
        if not self.has(key):
            return False
        addresses, place = self.read(key)
        return any(
            Place(**place).answers(one, _CONNECT_SECONDS) for one in dict.fromkeys(addresses)
        )

    def has_ended(self, number: int, index: int = -1) -> bool:
        """Return whether no launcher answers for a round: ask its launcher 0, both ways.

        Args:
            number: of the round.
            index: number of this launcher in it, if it takes part.
        """
        place = f"round/{number}/place"
        if await_any(self.store, [[place]], _OPENING_SECONDS, self.check) == 0:
            if self.reaches(number):
                return False
            loss = self.store.add(f"round/{number}/losses", 1) - 1
            self.tell(f"round/{number}/loss/{loss}", index)
            answer = f"round/{number}/alive/{loss}"
            if await_any(self.store, [[answer]], _ALIVE_SECONDS, self.check) == 0:
                return False
        return self.newest() == number

    def answer_losses(self, number: int, known: int) -> list[int]:
        """Answer those that have lost launcher 0, after the first `known`; return their numbers."""
        asked: list[int] = []
        while self.has(f"round/{number}/loss/{known + len(asked)}"):
            loss = known + len(asked)
            asked.append(int(self.read(f"round/{number}/loss/{loss}")))
            self.tell(f"round/{number}/alive/{loss}", 1)
        return asked
