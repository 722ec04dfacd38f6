"""`Join`: wait until enough launchers have joined a rendezvous round, so that the round can start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lockstep.errors import WorldError
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.keys import JoinEntry, RendezvousKeys

#: First and longest pause, in seconds, between two reads of the store.
_FIRST_PAUSE, _PAUSE = 0.002, 0.05
#: Number of reads of the store that all waiting launchers together make in a second.
READS_PER_SECOND = 4000
#: Number of launchers that read the entries of all others, and may start the round. Further launchers do so
#: only if the round has not started in time: N launchers that read N entries need N² reads.
_READERS = 4
#: Seconds that a later round waits for more launchers, if the expected launchers are known.
_SETTLE_SECONDS = 3.0
#: Seconds that a later round waits for more launchers, if no launchers are known to come.
_CAUTIOUS_SECONDS = 10.0
_LOOK_SECONDS = 5.0
#: Maximum number of launchers that a message names.
_NAMES = 8


def order(cards: Sequence[JoinEntry], most: int) -> tuple[JoinEntry, ...]:
    """Return the first `most` of the launchers' entries `cards`, sorted.

    Launchers that took part in an earlier round come first; new ones are sorted by node rank, then by
    arrival.
    """
    ranked = sorted(cards, key=lambda card: (-card.round, card.index))  # stable: by arrival
    return tuple(ranked[:most])


class Join:
    """Waits until a rendezvous round starts, on behalf of one launcher.

    A rendezvous round is a period in which the same launchers take part.

    Args:
        number: number of the round.
        own: entry of this launcher.
        expected: tokens of launchers that are known to join.
        may_close: whether this launcher may start the round, as no other round is in progress.
        hint: function that returns the hint for an error about missing launchers.
    """

    def __init__(
        self,
        keys: RendezvousKeys,
        number: int,
        own: JoinEntry,
        expected: Sequence[str],
        *,
        may_close: bool,
        config: RendezvousConfig,
        hint: Callable[[], str],
    ) -> None:
        self._keys, self._number, self._own = keys, number, own
        self._expected, self._may_close, self._config = set(expected), may_close, config
        self._hint = hint
        self._began = self._changed = self._looked = self._stalled = time.monotonic()
        self._place = expected.index(own.token) if own.token in expected else None
        self._cards: list[JoinEntry] = []

    def wait(self) -> tuple[JoinEntry, ...] | None:
        """Wait until the rendezvous round starts; return the entries of its launchers.

        Returns `None` if the round started without this launcher.

        Raises:
            LaunchEnded: if the launch ends during the wait.
            WorldError: if too few launchers join in time, or this launcher cannot join.
        """
        arrival = self._keys.arrive(self._number, self._own)
        if self._place is None:
            self._place = arrival
        pause, longest = _FIRST_PAUSE, max(_PAUSE, self._config.count / READS_PER_SECOND)
        while (cards := self._keys.closed(self._number)) is None:
            self._keys.check()
            self._keys.check_over()
            self._keys.check_failed(self._number)
            self._look(time.monotonic())
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return cards if self._own.token in {card.token for card in cards} else None

    def _look(self, now: float) -> None:
        """Read changes in the store; start the round if this launcher may and enough have joined.

        `now` is a value of `time.monotonic`.
        """
        if self._reads_cards(now):
            self._read_cards(now)
            self._check_numbers()
            if self._may_close and self._can_start(now):
                cards = order(self._cards, self._config.count)
                self._keys.close(self._number, cards, self._own.token)
        if not self._may_close and now - self._looked > _LOOK_SECONDS:
            newest = self._keys.newest_number
            self._may_close = newest == self._number - 1 and self._keys.has_ended(newest)
            self._looked = time.monotonic()
        if now - self._began > self._config.seconds and (
            # No timeout for a launcher that waits until another launcher leaves.
            self._may_close or len(self._keys.newest()[1]) < self._config.count
        ):
            self._read_cards(now)
            self._raise_missing()

    def _reads_cards(self, now: float) -> bool:
        """Return whether this launcher reads all launchers' entries, since it may have to start the round.

        The first four launchers of the last round, or the first four that joined, always read them. Other
        launchers do so only if enough have joined, and the round has not started after some seconds.
        """
        assert self._place is not None, "known after the arrival"
        if self._place < _READERS or now - self._stalled > self._longest_wait + _LOOK_SECONDS:
            return True
        if self._keys.arrived(self._number) < self._config.needed:
            self._stalled = now
        return False

    def _read_cards(self, now: float) -> None:
        if len(self._cards) < self._keys.arrived(self._number):
            cards = self._keys.cards(self._number, self._cards)
            if len(cards) != len(self._cards):
                self._cards, self._changed = cards, now

    def _check_numbers(self) -> None:
        """Raise an error if two launchers were given the same node rank."""
        first: dict[int, JoinEntry] = {}
        for card in self._cards if self._config.fixed else ():
            other = first.setdefault(card.index, card)
            if other is not card and card.index < self._config.count:
                text = f"node {card.index} has come twice: {other.node}, and {card.node}"
                self._fail(WorldError(text, hint="give each node a --node-rank of its own"))

    def _can_start(self, now: float) -> bool:
        """Return whether the round can start.

        It can if all launchers have joined, or if enough have and no other has joined for some seconds.
        """
        here = {card.token for card in self._cards}
        if len(here) < self._config.needed:
            return False
        if here >= self._expected if self._expected else len(here) >= self._config.count:
            return True
        return now - self._changed > self._longest_wait

    @property
    def _longest_wait(self) -> float:
        """Seconds to wait for further launchers after the minimum number has joined."""
        longest = self._config.seconds if self._number == 1 else _CAUTIOUS_SECONDS
        longest = _SETTLE_SECONDS if self._expected else longest
        return min(self._config.last_call, longest)

    def _raise_missing(self) -> None:
        seconds = f"{self._config.seconds:g} s"
        if not self._may_close:
            raise WorldError(
                f"the nodes that run there did not let {self._own.launcher.name} in within {seconds}",
                hint="look at the output of their launchers",
            )
        came, least = {card.index for card in self._cards}, self._config.needed
        absent = [f"node {index}" for index in range(least) if index not in came]
        numbered = self._config.fixed and max(came, default=least) < least
        which = f": {', '.join(absent[:_NAMES])}{' …' * (len(absent) > _NAMES)}" if numbered else ""
        names = ", ".join(card.launcher.name for card in self._cards[:_NAMES])
        names += " …" * (len(self._cards) > _NAMES)
        self._fail(
            WorldError(
                f"{least - len(self._cards)} of {least} nodes did not come within {seconds}{which}; "
                f"came: {names}",
                hint=self._hint(),
            )
        )

    def _fail(self, error: WorldError) -> None:
        """End the rendezvous round with `error` for all launchers that joined.

        If another launcher has ended it with an error before, that error is raised instead of `error`.
        """
        self._keys.fail(self._number, error)
        self._keys.check_failed(self._number)
