"""Rounds: launchers that may come and go meet again whenever one has come, or is gone.

approach ── arrive ── the round closes ── survey ── roster      (then they watch each other: neighbours)
└─ is a round going on, and can its launcher 0 be reached?
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from lockstep.errors import UnreachableError, WorldError
from lockstep.launch.coordinator_client import Owner
from lockstep.launch.coordinator_server import Place
from lockstep.launch.fixed_rendezvous import left, survey_roster
from lockstep.launch.join import Join, Terms
from lockstep.launch.membership import Launcher, Membership
from lockstep.launch.nodes import RendezvousConfig
from lockstep.launch.rdzv_endpoint import enter
from lockstep.launch.rendezvous_keys import Card, RendezvousKeys
from lockstep.world import host, membership_check, network

_APPROACH_SECONDS = 1.0
#: How many rounds may fail in a row because nodes do not reach each other.
_TRIES = 3


class ElasticRendezvous:
    """The rounds of a launch, as one launcher sees them.

    Args:
        party: how launchers find each other.
        own: what the others are to know of this one.
        terms: when a round begins.
        interface: network interface that the user chose.
        check: called again and again while others are waited for.
        say: tells the user who is in a round.

    Raises:
        NotNeeded: if the launch ends before there was a place for this launcher.
        UnreachableError: if nodes cannot reach each other.
        WorldError: if this launcher does not fit the launch, or too few come.
    """

    def __init__(
        self,
        party: RendezvousConfig,
        own: Launcher,
        terms: Terms,
        *,
        interface: str | None,
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._party, self._own, self._terms = party, own, terms
        self._interface, self._say = interface, say
        self._token = secrets.token_hex(8)
        self._owner = Owner()
        self._entrance = enter(party, terms.seconds, check)
        self.board = RendezvousKeys(self._entrance.store, check)
        self._cards: tuple[Card, ...] = ()
        #: Replicas of a run that names no number: as many as there may ever be ranks.
        self.replicas = terms.most * own.ranks
        #: Number of this round.
        self.number = 0
        #: Number of this round's first generation.
        self.generation = 0
        #: The launchers of this round.
        self.roster = Membership.alone(own.ranks)
        try:
            with self._reading():
                self._found()
                self._meet((), may_close=self._approach())
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Say in one line that the store is gone."""
        try:
            yield
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise WorldError(f"the place where the nodes meet is gone: {why}") from error

    @property
    def least(self) -> int:
        """How many launchers a round needs."""
        return self._terms.least

    @property
    def survives_host(self) -> bool:
        """Whether the launch goes on without the host of the store: there is none where it is a file."""
        return self._party.directory is not None

    @property
    def leads(self) -> bool:
        """Whether this launcher says what all are to know: once in a launch."""
        return self.roster.index == 0 and not self.board.has("told/directory")

    def tell(self, key: str, value: str) -> None:
        """Tell all launchers something, for the whole launch."""
        self.board.tell(f"told/{key}", value)

    def hear(self, key: str) -> str:
        """Return what launcher 0 has told, or will tell.

        Raises:
            WorldError: if it does not.
        """
        told = self.board.hear(f"told/{key}", self.number)
        if told is None:
            raise left(self.roster.names[0])
        return told

    def ready(self) -> None:
        """Do nothing: launchers are ready when they enter a generation."""

    def fail(self, error: Exception) -> None:
        """Tell those who wait for launcher 0 that it cannot go on."""
        if self.roster.index == 0:
            self.board.fail(self.number, f"{self.roster.names[0]} cannot start: {error}")

    def tell_place(self, place: Place) -> None:
        """Tell the others where launcher 0 of this round listens."""
        # One that is alone has not tried the network: any of its addresses may be the right one.
        here = [one.address for one in network.interfaces()]
        self.board.tell_place(self.number, [self.roster.address, *here], place)

    def hear_place(self) -> Place | None:
        """Return where launcher 0 of this round listens; `None` if it has left before it said so.

        Raises:
            WorldError: if it cannot go on.
        """
        return self.board.hear_place(self.number)

    # Meeting.

    def next(self, staying: Sequence[int], generation: int, *, lost_chair: bool) -> None:
        """Meet again.

        Args:
            staying: launchers of this round that are expected.
            generation: number of the next generation.
            lost_chair: whether this launcher has only lost launcher 0, and was told nothing.

        Raises:
            NotNeeded: if the launch ends before there was a place for this launcher.
            UnreachableError: if nodes cannot reach each other, again and again.
            WorldError: if too few come.
        """
        self.generation = generation
        expected = tuple(self._cards[index].token for index in staying)
        with self._reading():
            may_close = self._approach() if lost_chair else self._token in expected
            self._meet(expected if may_close else (), may_close=may_close)

    def give_up(self) -> None:
        """Meet again, because launcher 0 has not opened the round."""
        with self._reading():
            self._meet((), may_close=True)

    def _found(self) -> None:
        """Say what the launch is, or check that this launcher fits what another has said."""
        versions = host.versions()
        launch = self.board.found(
            {"name": self._own.name, "versions": versions, "replicas": self.replicas}
        )
        self.replicas, first = int(str(launch["replicas"])), launch["versions"]
        assert isinstance(first, dict)
        for library, version in first.items():
            if versions.get(library) != version:
                raise WorldError(
                    f"{self._own.name} has {library} {versions.get(library)}, {launch['name']} has "
                    f"{version}; expected the same on all nodes",
                    hint="the bits depend on it: install the same set on all nodes",
                )

    def _approach(self) -> bool:
        """Wait until the round that goes on can be reached; return whether there is none any more.

        Raises:
            UnreachableError: if this node stays cut off.
        """
        deadline = time.monotonic() + self._terms.seconds
        while True:
            self.board.check()
            self.board.check_over()
            newest = self.board.newest()
            index = self.roster.index if newest == self.number else -1
            if newest == 0 or self.board.has_ended(newest, index):
                return True
            if self.board.reaches(newest):
                return False
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{self._own.name} is cut off: launcher 0 of round {newest} lives, and could not "
                    f"be reached from here within {self._terms.seconds:g} s",
                    hint="look at the network between this node and the others",
                )
            time.sleep(_APPROACH_SECONDS)

    def _meet(self, expected: tuple[str, ...], *, may_close: bool) -> None:
        number, tries = self.board.newest() + 1, 0
        while True:
            arrival = Join(
                self.board,
                number,
                self._card(),
                expected,
                may_close=may_close,
                terms=self._terms,
            )
            cards = arrival.wait()
            if cards is not None:
                try:
                    self._take_seats(number, cards)
                except UnreachableError:
                    # Somebody has gone since the round was closed, or the network has.
                    tries += 1
                    if tries == _TRIES:
                        raise
                    expected, may_close = (), True
                else:
                    return
            number = max(number, self.board.newest()) + 1

    def _card(self) -> Card:
        if self.number:
            index = self.roster.index
        elif self._party.index is not None:
            index = self._party.index
        else:
            index = 0 if self._entrance.hosts else self._terms.most
        return Card(
            token=self._token,
            host=host.identity(),
            launcher=self._own,
            round=self.number,
            index=index,
            generation=self.generation,
        )

    def _take_seats(self, number: int, cards: tuple[Card, ...]) -> None:
        index = [card.token for card in cards].index(self._token)
        hosts = [
            membership_check.Card(
                host=card.host, name=card.launcher.name, pid=0, world=0, place=None, versions={}
            )
            for card in cards
        ]
        self.roster = survey_roster(
            self._party,
            index,
            [place.node_rank for place in membership_check.places(hosts)],
            [card.launcher for card in cards],
            self.board.network(number),
            self._interface,
            self.board.check,
        )
        self.number, self._cards = number, cards
        self.generation = max(card.generation for card in cards)
        if index == 0:
            self._say(f"lockstep: round {number}: {self.roster}")

    # While a round goes on: launcher 0.

    def newcomers(self) -> tuple[str, ...]:
        """Return the names of those who wait for the next round, as far as there is room."""
        room = self._terms.most - self.roster.count
        cards = self.board.cards(self.number + 1) if room else []
        return tuple(card.launcher.name for card in cards[:room])

    def is_superseded(self) -> bool:
        """Whether another round has begun without this launcher."""
        return self.board.newest() > self.number

    def answer_doubts(self, known: int) -> list[int]:
        """Answer those who have lost launcher 0, after the first `known`; return their numbers.

        A launcher whose own thread is stuck gives no answer: another round begins without it.
        """
        return [] if self._owner.is_stuck() else self.board.answer_doubts(self.number, known)

    def end(self) -> None:
        """Tell those who wait for a place that the launch is over."""
        self.board.end()

    def close(self) -> None:
        """Leave no file behind, and let nobody in any more."""
        self._entrance.close()
