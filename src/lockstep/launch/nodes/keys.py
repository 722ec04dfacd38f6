"""`RendezvousKeys`: keys in the store through which launchers find each other.

    newest              number of the newest round, and the key of its launchers' cards
    over                the launch has ended
    round/N/ ...
      card/K, arrivals  launchers that have joined the round
      cards/TOKEN       cards of all launchers of the round, as the launcher with this token wrote them
      failed, heard     error of a round that cannot begin; number of launchers that read it
      loss/K, alive/K   a launcher lost the connection to launcher 0; launcher 0 still runs

A round is a period in which the same launchers take part. A card is the entry of one launcher. After the
start of a round, launchers send reports over connections to launcher 0, since heartbeats in the store would
make a store in a file grow without limit. A launcher that lost the connection to launcher 0 first checks
through the store whether launcher 0 runs, so that only one half of a divided network begins another round.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.launch.nodes.membership import Common, LaunchEnded, Launcher
from lockstep.launch.nodes.server import ServerAddress
from lockstep.world.rendezvous.decode import decode
from lockstep.world.rendezvous.membership_check import HINTS, NodeInfo
from lockstep.world.waiting import Check, await_any

#: Seconds that launcher 0, which polls twice a second, has to answer through the store.
_ALIVE_SECONDS = 3.0
#: Seconds that the host of the store stays after an error, so that other launchers can read it.
_LINGER_SECONDS = 3.0
_PAUSE = 0.01
#: Maximum number of launchers in a row that died before they wrote their card.
_GAP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    """Entry that a launcher writes to the store in order to join a rendezvous round.

    Attributes:
        token: unique id of the launcher process.
        common: constants of the launch, used if this launcher is the first one.
        address: address of the launcher's server.
        round: last round in which the launcher took part; 0 for a new launcher.
        index: the launcher's number in that round; for a new launcher, its `--node-rank` if given.
        generation: number of the next start of workers, as far as the launcher knows.
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
    def parse(fields: Any) -> JoinEntry:
        """Return the `JoinEntry` (entry of a launcher) that the JSON value `fields` describes.

        Raises:
            WorldError: if another version of Lockstep wrote the fields.
        """
        try:
            return decode(JoinEntry, fields)
        except (KeyError, TypeError, ValueError):
            raise WorldError(
                "the card of another launcher cannot be read; expected the same Lockstep on all nodes",
                hint=HINTS["versions"],
            ) from None


@dataclass
class RendezvousKeys:
    """Reads and writes keys of the store through which launchers find each other.

    `check` is called repeatedly during waits, and may raise to end them.
    """

    store: dist.Store
    check: Check
    _heard: set[int] = field(default_factory=set, init=False)

    def network(self, number: int) -> dist.Store:
        """Return the store with a key prefix, for the connectivity check of rendezvous round `number`."""
        return dist.PrefixStore(f"round/{number}/network", self.store)

    def _write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _read(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    # Errors of a round.

    def fail(self, number: int, error: WorldError) -> None:
        """Write the error of rendezvous round `number`, which cannot begin, to the store.

        Only the first error of a round is stored. This launcher then counts as one that knows the error.
        """
        if self.store.add(f"round/{number}/failures", 1) == 1:
            self._write(f"round/{number}/failed", [error.message, error.hint])
        self._count_heard(number)

    def check_failed(self, number: int) -> None:
        """Raise the error that the store has for rendezvous round `number`, if it has one.

        The error says why the round cannot begin.

        Raises:
            WorldError: the same on all launchers.
        """
        if self._has(f"round/{number}/failed"):
            message, hint = self._read(f"round/{number}/failed")
            self._count_heard(number)
            raise WorldError(message, hint=hint)

    def _count_heard(self, number: int) -> None:
        """Add 1 to the count of launchers that have read the error of rendezvous round `number`.

        The count is in the store. Further calls for the same round have no effect.
        """
        if number not in self._heard:
            self._heard.add(number)
            self.store.add(f"round/{number}/heard", 1)

    def linger(self, number: int) -> None:
        """If rendezvous round `number` has failed, wait until its launchers have read the error.

        The wait ends after 3 s at the latest.
        """
        heard, deadline = f"round/{number}/heard", time.monotonic() + _LINGER_SECONDS
        if not self._has(f"round/{number}/failed"):
            return
        while self.store.add(heard, 0) < self.arrived(number) and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    # The launch.

    def end(self) -> None:
        """Record that the launch is over, for launchers that wait to join."""
        self._write("over", 1)

    def check_over(self) -> None:
        """Raise `LaunchEnded` if the launch is over."""
        if self._has("over"):
            raise LaunchEnded

    # Rounds.

    @property
    def newest_number(self) -> int:
        """Number of the newest rendezvous round; 0 before the first round."""
        return int(json.loads(self._newest() or "[0]")[0])

    def newest(self) -> tuple[int, tuple[JoinEntry, ...]]:
        """Return number and launchers of the newest rendezvous round; number 0 before the first round."""
        before = self._newest()
        if not before:
            return 0, ()
        number, key = json.loads(before)
        cards = json.loads(zlib.decompress(self.store.get(key)))
        return number, tuple(map(JoinEntry.parse, cards))

    def _newest(self) -> str:
        return self.store.get("newest").decode() if self._has("newest") else ""

    def arrive(self, number: int, card: JoinEntry) -> int:
        """Join rendezvous round `number`: write `card`, the entry of this launcher, to the store.

        Returns the number of launchers that began to join earlier.
        """
        arrival = self.store.add(f"round/{number}/arrivals", 1) - 1
        self._write(f"round/{number}/card/{arrival}", asdict(card))
        return arrival

    def arrived(self, number: int) -> int:
        """Return how many launchers have begun to join rendezvous round `number`.

        Some of them may not have written their entry yet.
        """
        key = f"round/{number}/arrivals"
        return int(self.store.get(key)) if self._has(key) else 0

    def cards(self, number: int, known: Sequence[JoinEntry] = ()) -> list[JoinEntry]:
        """Return the entries of all launchers that joined rendezvous round `number`.

        The entries in `known` were read before, and are not read again.
        """
        cards = {card.token: card for card in known}
        gap, arrival = 0, len(cards)
        while gap < _GAP:
            key = f"round/{number}/card/{arrival}"
            arrival += 1
            if not self._has(key):
                gap += 1
                continue
            gap, card = 0, JoinEntry.parse(self._read(key))
            cards.setdefault(card.token, card)
        return list(cards.values())

    def close(self, number: int, cards: Sequence[JoinEntry], token: str) -> None:
        """Start rendezvous round `number` with the launchers in `cards`, unless it or a newer one started.

        The launchers are written first, at a key of the launcher `token` that calls this method. A single
        atomic write of the round's number then starts the round, so that the store stays consistent if this
        launcher dies or is stopped here. Launchers that wait read the number alone, and often.
        """
        before = self._newest()
        if json.loads(before or "[0]")[0] < number:
            key = f"round/{number}/cards/{token}"
            text = json.dumps([asdict(card) for card in cards])
            self.store.set(key, zlib.compress(text.encode()))  # type: ignore[arg-type]  # bytes, as get
            self.store.compare_set("newest", before, json.dumps([number, key]))

    def closed(self, number: int) -> tuple[JoinEntry, ...] | None:
        """Return the entries of the launchers of rendezvous round `number` when no other can join any more.

        Returns `None` while launchers can still join, and an empty tuple if a newer round has started.
        """
        if self.newest_number < number:
            return None
        newest, cards = self.newest()
        return cards if newest == number else ()

    # Launcher 0 of a round.

    def reaches(self, number: int) -> bool:
        """Return whether round `number` is the newest, and its launcher 0 answers a ping."""
        newest, cards = self.newest()
        return newest == number and any(card.address.answers() for card in cards[:1])

    def has_ended(self, number: int, index: int = -1) -> bool:
        """Return whether launcher 0 of rendezvous round `number` has ended.

        It counts as ended if it answers neither over the network nor through the store, and no newer round
        has started. `index` is the number of this launcher in the round; -1 if this launcher takes no part.
        """
        if self.reaches(number):
            return False
        loss = self.store.add(f"round/{number}/losses", 1) - 1
        self._write(f"round/{number}/loss/{loss}", index)
        answer = f"round/{number}/alive/{loss}"
        if await_any(self.store, [[answer]], _ALIVE_SECONDS, self.check) == 0:
            return False
        return self.newest_number == number

    def answer_losses(self, number: int, known: int) -> list[int]:
        """Tell launchers that lost their connection that launcher 0 is alive; return their indices.

        Each such launcher reports its loss in the store, and the answer is written there. `number`: number
        of the rendezvous round. `known`: number of reports that were answered earlier.
        """
        asked: list[int] = []
        while self._has(f"round/{number}/loss/{known + len(asked)}"):
            loss = known + len(asked)
            asked.append(int(self._read(f"round/{number}/loss/{loss}")))
            self._write(f"round/{number}/alive/{loss}", 1)
        return asked
