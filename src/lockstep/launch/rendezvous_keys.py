"""What launchers that come and go leave for each other in the store where they meet.

    newest              number of the newest round, and who takes part in it; what follows is under round/N
    card/K, arrivals    who has come to a round
    place               where its launcher 0 listens
    doubt/K, alive/K    somebody has lost launcher 0; launcher 0 lives

Nothing in it beats, since a file only grows. Who lives is known by launcher 0 of a round; whoever has
lost launcher 0 asks it here, before there is another round: of two halves of a network, one goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.launch.coordinator_server import Place
from lockstep.launch.membership import Launcher, NotNeeded
from lockstep.world.waiting import Check, await_any

#: How long whoever has to say something first may take.
_OPENING_SECONDS = 20.0
#: How long launcher 0, which looks twice a second, may take to say that it lives.
_ALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 2.0
#: Arrivals that may have died before they said who they are, in a row.
_GAP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a launcher says of itself when it arrives.

    Attributes:
        token: tells it from all others, for as long as it lives.
        host: which host it is on, as `host.identity` has it.
        launcher: what it starts.
        round: the last round that it took part in; 0 for a newcomer.
        index: its number there; of a newcomer, what the user gave it.
        generation: number of the next generation, as far as it knows.
    """

    token: str
    host: str
    launcher: Launcher
    round: int
    index: int
    generation: int

    @staticmethod
    def parse(text: bytes | str) -> Card:
        """Read what `asdict` and JSON have made of one."""
        told = json.loads(text)
        return Card(**{**told, "launcher": Launcher.parse(json.dumps(told["launcher"]).encode())})


class RendezvousKeys:
    """The store where launchers meet.

    Args:
        store: one that all of them reach.
        check: called again and again while others are waited for.
    """

    def __init__(self, store: dist.Store, check: Check) -> None:
        self.store = store
        self.check = check

    def network(self, number: int) -> dist.Store:
        """Return a part of the store for the survey of a round."""
        return dist.PrefixStore(f"round/{number}/network", self.store)

    def tell(self, key: str, value: str) -> None:
        """Leave a note."""
        self.store.set(key, value)

    def has(self, key: str) -> bool:
        """Return whether there is a note."""
        return bool(self.store.check([key]))

    def hear(self, key: str, number: int) -> str | None:
        """Return a note that launcher 0 of a round is to leave; `None` if it does not.

        Raises:
            WorldError: if it cannot go on.
        """
        failed = f"round/{number}/failed"
        found = await_any(self.store, [[failed], [key]], _OPENING_SECONDS, self.check)
        if found == 0:
            raise WorldError(self._get(failed), hint="look at the output of its launcher")
        return None if found is None else self._get(key)

    def _get(self, key: str) -> str:
        return self.store.get(key).decode()

    def fail(self, number: int, why: str) -> None:
        """Say that launcher 0 of a round cannot go on."""
        self.tell(f"round/{number}/failed", why)

    # The launch.

    def found(self, launch: dict[str, object]) -> dict[str, object]:
        """Say what the launch is, or return what another has said.

        Raises:
            WorldError: if the first one has left.
        """
        if self.store.add("founders", 1) == 1:
            self.tell("launch", json.dumps(launch))
        if await_any(self.store, [["launch"]], _OPENING_SECONDS, self.check) is None:
            raise WorldError("the first node has left before it said what it starts")
        told: dict[str, object] = json.loads(self._get("launch"))
        return told

    def end(self) -> None:
        """Tell those who wait for a place that the launch is over."""
        self.tell("over", "1")

    def check_over(self) -> None:
        """Raise `NotNeeded` if the launch is over."""
        if self.has("over"):
            raise NotNeeded

    # ElasticRendezvous.

    def newest(self) -> int:
        """Return the number of the newest round; 0 before the first."""
        return self._newest()[0]

    def _newest(self) -> tuple[int, list[dict[str, object]], str]:
        """Return the number of the newest round, its cards, and both as they stand in the store."""
        if not self.has("newest"):
            return 0, [], ""
        text = self._get("newest")
        number, cards = json.loads(text)
        return number, cards, text

    def arrive(self, number: int, card: Card) -> None:
        """Come to a round."""
        arrival = self.store.add(f"round/{number}/arrivals", 1) - 1
        self.tell(f"round/{number}/card/{arrival}", json.dumps(asdict(card)))

    def cards(self, number: int, known: Sequence[Card] = ()) -> list[Card]:
        """Return the cards of all who have come to a round; `known` are those that were read before."""
        cards = list(known)
        seen = {card.token for card in cards}
        gap, arrival = 0, len(cards)
        while gap < _GAP:
            key = f"round/{number}/card/{arrival}"
            arrival += 1
            if not self.has(key):
                gap += 1
                continue
            gap, card = 0, Card.parse(self._get(key))
            if card.token not in seen:
                seen.add(card.token)
                cards.append(card)
        return cards

    def may_close(self, number: int) -> bool:
        """Return whether this launcher, and no other, is to close a round; asked once."""
        return bool(self.store.add(f"round/{number}/closing", 1) == 1)

    def close(self, number: int, cards: Sequence[Card]) -> None:
        """Begin a round with these launchers, unless a newer one has begun.

        One write says that it has begun, and with whom: a launcher that dies here leaves the whole of it
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
        return tuple(Card.parse(json.dumps(one)) for one in cards) if newest == number else ()

    # Launcher 0 of a round.

    def tell_place(self, number: int, addresses: Sequence[str], place: Place) -> None:
        """Say where launcher 0 of a round listens, and at which addresses it may be reached."""
        self.tell(f"round/{number}/place", json.dumps([list(addresses), place.spell()]))

    def hear_place(self, number: int) -> Place | None:
        """Return where launcher 0 of a round listens; `None` if it has left before it said so."""
        told = self.hear(f"round/{number}/place", number)
        return None if told is None else Place.parse(json.loads(told)[1])

    def reaches(self, number: int) -> bool:
        """Return whether launcher 0 of a round answers this launcher on the network."""
        key = f"round/{number}/place"
        if not self.has(key):
            return False
        addresses, told = json.loads(self._get(key))
        place = Place.parse(told)
        return any(place.answers(one, _CONNECT_SECONDS) for one in dict.fromkeys(addresses))

    def has_ended(self, number: int, index: int = -1) -> bool:
        """Return whether nobody answers for a round: ask its launcher 0, both ways.

        Args:
            number: of the round.
            index: number of this launcher in it, if it takes part.
        """
        place = f"round/{number}/place"
        if await_any(self.store, [[place]], _OPENING_SECONDS, self.check) == 0:
            if self.reaches(number):
                return False
            doubt = self.store.add(f"round/{number}/doubts", 1) - 1
            self.tell(f"round/{number}/doubt/{doubt}", str(index))
            answer = f"round/{number}/alive/{doubt}"
            if await_any(self.store, [[answer]], _ALIVE_SECONDS, self.check) == 0:
                return False
        return self.newest() == number

    def answer_doubts(self, number: int, known: int) -> list[int]:
        """Answer those who have lost launcher 0, after the first `known`; return their numbers."""
        asked: list[int] = []
        while self.has(f"round/{number}/doubt/{known + len(asked)}"):
            doubt = known + len(asked)
            asked.append(int(self._get(f"round/{number}/doubt/{doubt}")))
            self.tell(f"round/{number}/alive/{doubt}", "1")
        return asked
