"""Keys of the rendezvous store of launchers.

    newest              number of the newest round, and the cards of its members
    over                the launch has ended
    round/N/ ...
      card/K, arrivals  launchers that have joined the round
      failed, heard     why it cannot begin, and how many have read it
      loss/K, alive/K   a launcher has lost launcher 0; launcher 0 lives

A card has the address of its launcher: reports in a round go over a connection to its launcher 0.
There are no heartbeats here, since a file only grows. A launcher that has lost launcher 0 asks it here,
before there is another round: of two halves of a network, one continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.launch.nodes.membership import Common, Launcher, NotNeeded
from lockstep.launch.nodes.server import ServerAddress
from lockstep.world.rendezvous.decode import decode
from lockstep.world.rendezvous.membership_check import HINTS, NodeInfo
from lockstep.world.waiting import Check, await_any

#: How long launcher 0, which looks twice a second, may take to answer that it lives.
_ALIVE_SECONDS = 3.0
#: How long the host of the store, which goes with it, stays for others to read why it leaves.
_LINGER_SECONDS = 3.0
_PAUSE = 0.01
#: Launchers that may have died before they wrote their card, in a row.
_GAP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A launcher that joins a round.

    Attributes:
        token: unique, for as long as it lives.
        common: of the launch, if this launcher is the first of it.
        address: where it listens.
        round: the last round that it took part in; 0 for a newcomer.
        index: its number there; of a newcomer, its number by the user.
        generation: number of the next generation, as far as it knows.
    """

    token: str
    node: NodeInfo
    launcher: Launcher
    common: Common
    address: ServerAddress
    round: int
    index: int
    generation: int

    @staticmethod
    def parse(fields: Any) -> Card:
        """Return the card with these fields.

        Raises:
            WorldError: if it has others.
        """
        try:
            return decode(Card, fields)
        except (KeyError, TypeError, ValueError):
            raise WorldError(
                "the card of another launcher cannot be read; expected the same Lockstep on all nodes",
                hint=HINTS["versions"],
            ) from None


class RendezvousKeys:
    """The rendezvous store of launchers; `check` is called again and again in waits for others."""

    def __init__(self, store: dist.Store, check: Check) -> None:
        self.store = store
        self.check = check
        self._heard: set[int] = set()

    def network(self, number: int) -> dist.Store:
        """Return a part of the store for the connectivity check of a round."""
        return dist.PrefixStore(f"round/{number}/network", self.store)

    def _write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _read(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    # A round that cannot begin.

    def fail(self, number: int, error: WorldError) -> None:
        """Write why a round cannot begin, for all that join it; the first reason counts."""
        if self.store.add(f"round/{number}/failures", 1) == 1:
            self._write(f"round/{number}/failed", [error.message, error.hint])
        self._count_heard(number)

    def check_failed(self, number: int) -> None:
        """Raise the error of a round that cannot begin.

        Raises:
            WorldError: the same for all.
        """
        if self._has(f"round/{number}/failed"):
            message, hint = self._read(f"round/{number}/failed")
            self._count_heard(number)
            raise WorldError(message, hint=hint)

    def _count_heard(self, number: int) -> None:
        """Count this launcher, once, among those that know why a round cannot begin."""
        if number not in self._heard:
            self._heard.add(number)
            self.store.add(f"round/{number}/heard", 1)

    def linger(self, number: int) -> None:
        """Wait a moment until all that joined a round have read why it cannot begin."""
        heard, deadline = f"round/{number}/heard", time.monotonic() + _LINGER_SECONDS
        if not self._has(f"round/{number}/failed"):
            return
        while self.store.add(heard, 0) < self.arrived(number) and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    # The launch.

    def end(self) -> None:
        """Write that the launch is over, for those that wait for a place."""
        self._write("over", 1)

    def check_over(self) -> None:
        """Raise `NotNeeded` if the launch is over."""
        if self._has("over"):
            raise NotNeeded

    # Rounds.

    def newest(self) -> tuple[int, tuple[Card, ...]]:
        """Return the number of the newest round, 0 before the first, and who takes part in it."""
        number, cards = json.loads(self._newest() or "[0, []]")
        return number, tuple(map(Card.parse, cards))

    def _newest(self) -> str:
        return self.store.get("newest").decode() if self._has("newest") else ""

    def arrive(self, number: int, card: Card) -> None:
        """Join a round."""
        arrival = self.store.add(f"round/{number}/arrivals", 1) - 1
        self._write(f"round/{number}/card/{arrival}", asdict(card))

    def arrived(self, number: int) -> int:
        """Return how many have joined a round; some may have died before they wrote their card."""
        key = f"round/{number}/arrivals"
        return int(self.store.get(key)) if self._has(key) else 0

    def cards(self, number: int, known: Sequence[Card] = ()) -> list[Card]:
        """Return the cards of all that have joined a round; `known` are those that were read before."""
        cards = {card.token: card for card in known}
        gap, arrival = 0, len(cards)
        while gap < _GAP:
            key = f"round/{number}/card/{arrival}"
            arrival += 1
            if not self._has(key):
                gap += 1
                continue
            gap, card = 0, Card.parse(self._read(key))
            cards.setdefault(card.token, card)
        return list(cards.values())

    def close(self, number: int, cards: Sequence[Card]) -> None:
        """Begin a round with these launchers, unless a newer one has begun.

        One write has its begin and its members: a launcher that dies here leaves the whole of it
        or nothing, and one that was stopped for a while does not undo what others have done since.
        """
        before = self._newest()
        if json.loads(before or "[0]")[0] < number:
            text = json.dumps([number, [asdict(card) for card in cards]])
            self.store.compare_set("newest", before, text)

    def closed(self, number: int) -> tuple[Card, ...] | None:
        """Return the launchers of a round, once it has begun; none of one that is over."""
        newest, cards = self.newest()
        return None if newest < number else cards if newest == number else ()

    # Launcher 0 of a round.

    def reaches(self, number: int) -> bool:
        """Return whether launcher 0 of a round answers this launcher on the network."""
        newest, cards = self.newest()
        return newest == number and any(card.address.answers() for card in cards[:1])

    def has_ended(self, number: int, index: int = -1) -> bool:
        """Return whether launcher 0 of a round answers neither on the network nor in the store.

        `index` is the number of this launcher in the round, if it takes part.
        """
        if self.reaches(number):
            return False
        loss = self.store.add(f"round/{number}/losses", 1) - 1
        self._write(f"round/{number}/loss/{loss}", index)
        answer = f"round/{number}/alive/{loss}"
        if await_any(self.store, [[answer]], _ALIVE_SECONDS, self.check) == 0:
            return False
        return self.newest()[0] == number

    def answer_losses(self, number: int, known: int) -> list[int]:
        """Answer launchers that have lost launcher 0, after the first `known`; return their numbers."""
        asked: list[int] = []
        while self._has(f"round/{number}/loss/{known + len(asked)}"):
            loss = known + len(asked)
            asked.append(int(self._read(f"round/{number}/loss/{loss}")))
            self._write(f"round/{number}/alive/{loss}", 1)
        return asked
