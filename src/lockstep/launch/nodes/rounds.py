"""Rendezvous rounds of an elastic launch: a new one when a launcher has joined or is lost.

approach ── arrive ── the round closes ── connectivity check ── membership   (then they watch each other)
└─ is a round in progress, and can its launcher 0 be reached?

A launch whose launchers do not come and go has one round, which needs all of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import LockstepError, UnreachableError, WorldError
from lockstep.launch.nodes.client import Owner
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.endpoint import enter, missing_hint
from lockstep.launch.nodes.join import Join, Terms
from lockstep.launch.nodes.keys import Card, RendezvousKeys
from lockstep.launch.nodes.membership import Launcher, Membership, owns
from lockstep.launch.nodes.server import Place
from lockstep.world import network
from lockstep.world.rendezvous.connectivity_check import Reach, check_connectivity
from lockstep.world.rendezvous.membership_check import (
    HINTS,
    NodeInfo,
    differing_versions,
    node_numbers,
)

_APPROACH_SECONDS = 1.0
#: How many rounds may fail in a row because nodes do not reach each other.
_TRIES = 3
#: How long a launcher may keep the others waiting in the connectivity check: of a launch with one round,
#: and where another round begins else.
_PATIENCE, _ROUND_PATIENCE = 30.0, 4.0
#: How long launcher 0 may take to make its directories and to listen: of a launch with one round, and else.
_START_SECONDS, _OPENING_SECONDS = 60.0, 20.0
#: How long a launcher that has nothing good to tell waits for others to tell it to.
_SECONDS_IN_VAIN = 20.0


class Rounds:
    """The rounds of a launch, as one launcher sees them.

    Args:
        config: how launchers find each other.
        own: what the others are to know of this one.
        terms: when a round begins.
        interface: network interface that the user chose.
        check: called again and again while others are waited for.
        say: shows the user the members of a round.

    Raises:
        NotNeeded: if the launch ends before there was a place for this launcher.
        UnreachableError: if nodes cannot reach each other.
        WorldError: if this launcher does not fit the launch, or too few come.
    """

    def __init__(
        self,
        config: RendezvousConfig,
        own: Launcher,
        terms: Terms,
        *,
        interface: str | None,
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._own, self._node = config, own, NodeInfo.here(os.getpid())
        self._interface, self._say = interface, say
        if interface is not None and all(one.name != interface for one in network.interfaces()):
            # Only to let the others know: the connectivity check names it.
            terms = replace(terms, seconds=min(terms.seconds, _SECONDS_IN_VAIN))
        self._terms = terms
        self._token = secrets.token_hex(8)
        self._owner = Owner()
        self._endpoint = enter(config, terms.seconds, check)
        self.keys = RendezvousKeys(self._endpoint.store, check)
        self._cards: tuple[Card, ...] = ()
        self._replicas = terms.most * own.ranks
        #: Number of this round, and of the one that this launcher joins.
        self.number, self._joining = 0, 1
        #: Number of this round's first generation.
        self.generation = 0
        #: The launchers of this round.
        self.membership = Membership.alone(own.ranks)
        try:
            with self._reading():
                self._found()
                self._meet((), may_close=self._approach())
        except BaseException:
            self.close()
            raise
        if terms.fixed:
            self._endpoint.admit_no_more()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Say in one line that the store is gone; its host goes after the others have read why."""
        try:
            yield
        except WorldError:
            if self._endpoint.hosts:
                self.keys.linger(self._joining)
            raise
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            if self._config.directory is not None:
                raise WorldError(
                    f"the rendezvous in {self._config.directory} cannot be read: {why}",
                    hint="is the directory still there?",
                ) from error
            raise WorldError(
                f"the node that hosts the rendezvous has left: {why}",
                hint="look at the output of its launcher",
            ) from error

    @property
    def fixed(self) -> bool:
        """Whether this round is the only one."""
        return self._terms.fixed

    @property
    def least(self) -> int | None:
        """How many launchers a round needs; `None` where there is no other round."""
        return None if self._terms.fixed else self._terms.least

    @property
    def replicas(self) -> int | None:
        """Replicas of a run that names no number: as many as there may ever be ranks; `None` if fixed."""
        return None if self._terms.fixed else self._replicas

    @property
    def survives_host(self) -> bool:
        """Whether the launch continues without the host of the store: there is none where it is a file."""
        return self._config.directory is not None

    @property
    def leads(self) -> bool:
        """Whether this launcher says what all are to know: once in a launch."""
        return self.membership.index == 0 and not self.keys.has("told")

    def tell(self, told: Any) -> None:
        """Tell all launchers something, for the whole launch."""
        self.keys.tell("told", told)

    def hear(self) -> Any:
        """Return what launcher 0 has told, or will tell.

        Raises:
            WorldError: if it does not.
        """
        told = self._hear("told")
        if told is None:
            raise self._not_ready()
        return told

    @property
    def _seconds(self) -> float:
        """How long launcher 0 may take to say something."""
        return _START_SECONDS if self._terms.fixed else _OPENING_SECONDS

    def _hear(self, key: str) -> Any:
        with self._reading():
            return self.keys.hear(key, self.number, self._seconds)

    def check_failed(self) -> None:
        """Raise what was told if a launcher of the only round cannot start its ranks.

        Raises:
            WorldError: the same for all.
        """
        if self._terms.fixed:
            with self._reading():
                self.keys.check_failed(self.number)

    def fail(self, error: LockstepError) -> None:
        """Tell those that wait for this launcher that it cannot continue."""
        if self._terms.fixed or self.membership.index == 0:
            name = self.membership.names[self.membership.index]
            text = f"{name} cannot start its ranks: {error.message}"
            self.keys.fail(self.number, WorldError(text, hint="look at the output of its launcher"))
            if self._endpoint.hosts:
                self.keys.linger(self.number)

    def tell_place(self, place: Place) -> None:
        """Tell the others where launcher 0 of this round listens."""
        # One that is alone has not tried the network: any of its addresses may be the right one.
        here = [] if self._terms.fixed else [one.address for one in network.interfaces()]
        self.keys.tell_place(self.number, [self.membership.address, *here], place)

    def hear_place(self) -> Place | None:
        """Return where launcher 0 of this round listens; `None` if it does not say so in time.

        Raises:
            WorldError: if it cannot continue.
        """
        told = self._hear(f"round/{self.number}/place")
        if told is None and self._terms.fixed:
            raise self._not_ready()
        return None if told is None else Place(**told[1])

    def _not_ready(self) -> WorldError:
        return WorldError(
            f"{self.membership.names[0]} was not ready within {self._seconds:g} s",
            hint="look at the output of its launcher",
        )

    # Meeting.

    def next(self, staying: Sequence[int], generation: int, *, lost_coordinator: bool) -> None:
        """Meet again.

        Args:
            staying: launchers of this round that are expected.
            generation: number of the next generation.
            lost_coordinator: whether this launcher has only lost launcher 0, and was told nothing.

        Raises:
            NotNeeded: if the launch ends before there was a place for this launcher.
            UnreachableError: if nodes cannot reach each other, again and again.
            WorldError: if too few come.
        """
        self.generation = generation
        expected = tuple(self._cards[index].token for index in staying)
        with self._reading():
            may_close = self._approach() if lost_coordinator else self._token in expected
            self._meet(expected if may_close else (), may_close=may_close)

    def give_up(self) -> None:
        """Meet again, because launcher 0 has not opened the round."""
        with self._reading():
            self._meet((), may_close=True)

    def _found(self) -> None:
        """Say what the launch is, or check that this launcher fits what another has said."""
        launch = self.keys.found(
            {"name": self._own.name, "versions": self._node.versions, "replicas": self._replicas}
        )
        self._replicas = launch["replicas"]
        text = differing_versions(
            self._own.name, self._node.versions, launch["name"], launch["versions"]
        )
        if text is not None:
            error = WorldError(text, hint=HINTS["versions"])
            if self._terms.fixed and self.keys.newest() == 0:
                self.keys.fail(1, error)
            raise error

    def _approach(self) -> bool:
        """Wait until the round that continues can be reached; return whether there is none any more.

        Raises:
            UnreachableError: if this node stays cut off.
            WorldError: if the only round has begun without this launcher.
        """
        deadline = time.monotonic() + self._terms.seconds
        while True:
            self.keys.check()
            self.keys.check_over()
            newest = self.keys.newest()
            index = self.membership.index if newest == self.number else -1
            if newest == 0:
                return True
            self._check_open()
            if self.keys.has_ended(newest, index):
                return True
            if self.keys.reaches(newest):
                return False
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{self._own.name} is cut off: launcher 0 of round {newest} lives, and could not "
                    f"be reached from here within {self._terms.seconds:g} s",
                    hint="look at the network between this node and the others",
                )
            time.sleep(_APPROACH_SECONDS)

    def _check_open(self) -> None:
        if self._terms.fixed:
            if self.keys.newest() == 0:
                raise WorldError(
                    "the launch did not begin: the launcher that was to begin it is gone",
                    hint="look at the output of the others",
                )
            raise WorldError(
                f"{self._terms.most} nodes have joined at {self._config.place} already; "
                "expected this one among them",
                hint="another launch uses this rendezvous: give each an --rdzv-id of its own",
            )

    def _meet(self, expected: tuple[str, ...], *, may_close: bool) -> None:
        number, tries = self.keys.newest() + 1, 0
        while True:
            self._joining = number
            cards = Join(
                self.keys,
                number,
                self._card(),
                expected,
                may_close=may_close,
                terms=self._terms,
                hint=self._hint,
            ).wait()
            if cards is not None:
                try:
                    self._take_part(number, cards)
                except UnreachableError:
                    # A launcher has gone since the round was closed, or the network has.
                    tries += 1
                    if self._terms.fixed or tries == _TRIES:
                        raise
                    expected, may_close = (), True
                else:
                    return
            self._check_open()
            number = max(number, self.keys.newest()) + 1

    def _hint(self) -> str:
        """Return what to look at if launchers are missing."""
        if not self._terms.fixed:
            return "--nnodes MIN:MAX says how many must come, --join-timeout how long they may take"
        return missing_hint(self._config, hosts=self._endpoint.hosts)

    def _card(self) -> Card:
        if self.number:
            index = self.membership.index
        elif self._config.index is not None:
            index = self._config.index
        else:
            index = 0 if self._endpoint.hosts else self._terms.most
        return Card(
            token=self._token,
            node=self._node,
            launcher=self._own,
            round=self.number,
            index=index,
            generation=self.generation,
        )

    def _take_part(self, number: int, cards: tuple[Card, ...]) -> None:
        """Become a member of a round; the nodes try to reach each other."""
        index = [card.token for card in cards].index(self._token)
        launchers = [card.launcher for card in cards]
        names = tuple(f"node {number} ({one.name})" for number, one in enumerate(launchers))
        nodes = node_numbers([card.node.host for card in cards])
        reach: tuple[Reach, ...] = ()
        if len(set(nodes)) > 1:
            reach = check_connectivity(
                self.keys.network(number),
                index=index,
                labels=names,
                interface=self._interface,
                patience=_PATIENCE if self._terms.fixed else _ROUND_PATIENCE,
                check=self.keys.check,
            )
        self.membership = Membership(
            index=index,
            ranks=tuple(one.ranks for one in launchers),
            nodes=tuple(nodes),
            names=names,
            address=reach[0].address if reach else network.LOOPBACK,
            interface=reach[index].interface if reach else None,
            own_cores=owns(index, nodes, [one.cpus for one in launchers]),
            own_gpus=owns(index, nodes, [one.gpus for one in launchers]),
            overrules_interface=self._interface is not None,
            reached_at=tuple(map(str, reach)),
            speaks=index == 0 or not self._config.shares_output,
        )
        self.number, self._cards = number, cards
        self.generation = max(card.generation for card in cards)
        if index == 0:
            which = "" if self._terms.fixed else f" round {number}:"
            self._say(f"lockstep:{which} {self.membership}")

    # While a round continues: launcher 0.

    def newcomers(self) -> tuple[str, ...]:
        """Return the names of those that wait for the next round, as far as there is room."""
        room = self._terms.most - self.membership.count
        cards = self.keys.cards(self.number + 1) if room else []
        return tuple(card.launcher.name for card in cards[:room])

    def is_superseded(self) -> bool:
        """Whether another round has begun without this launcher."""
        return self.keys.newest() > self.number

    def answer_losses(self, known: int) -> list[int]:
        """Answer those that have lost launcher 0, after the first `known`; return their numbers.

        A launcher whose own thread is stuck gives no answer: another round begins without it.
        """
        return [] if self._owner.is_stuck() else self.keys.answer_losses(self.number, known)

    def end(self) -> None:
        """Tell those that wait for a place that the launch is over."""
        self.keys.end()

    def close(self) -> None:
        """Leave no file behind, and admit no more."""
        self._endpoint.close()
