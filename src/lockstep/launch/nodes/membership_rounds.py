"""Rendezvous rounds of an elastic launch: a new one when a launcher has joined or is lost.

approach ── join ── the round starts ── connectivity check ── membership ── coordinator and clients
└─ is a round in progress, and can its launcher 0 be reached?

A launch of a fixed size has launcher round, which needs all launchers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lockstep.errors import UnreachableError, WorldError
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.endpoint import enter, missing_hint
from lockstep.launch.nodes.join import Join
from lockstep.launch.nodes.keys import Card, RendezvousKeys
from lockstep.launch.nodes.membership import Common, Launcher, Membership, owns
from lockstep.launch.nodes.server import CoordinatorServer, ServerAddress
from lockstep.launch.nodes.store_watch import StoreWatch
from lockstep.world import network
from lockstep.world.rendezvous.connectivity_check import Reach, check_connectivity, offers
from lockstep.world.rendezvous.membership_check import (
    HINTS,
    NodeInfo,
    differing_versions,
    node_numbers,
)

_APPROACH_SECONDS = 1.0
#: How many rounds may fail in a row because nodes do not reach each other.
_TRIES = 3
#: How long a launcher may keep the others waiting in the connectivity check: in a launch with one round,
#: and in one where another round can follow.
_PATIENCE, _ROUND_PATIENCE = 30.0, 4.0
#: How long a launcher whose interface is wrong waits for others, to end their launch too.
_SECONDS_TO_FAIL = 20.0


class Rounds:
    """The rounds of a launch that one launcher takes part in.

    Args:
        config: of the rendezvous.
        own: this launcher's ranks and devices.
        interface: network interface that the user chose.
        check: called again and again while others are waited for.
        say: shows the user the members of a round.
        stamp: name of the directory of the run that the launch continues, if this launcher is the first.

    Raises:
        NotNeeded: if the launch ends before there was a place for this launcher.
        UnreachableError: if nodes cannot reach each other.
        WorldError: if this launcher does not fit the launch, or too few join.
    """

    def __init__(
        self,
        config: RendezvousConfig,
        own: Launcher,
        *,
        interface: str | None,
        check: Callable[[], None],
        say: Callable[[str], None],
        stamp: str | None = None,
    ) -> None:
        self._own, self._node = own, NodeInfo.here(os.getpid())
        self._interface, self._say = interface, say
        if interface is not None and all(own.name != interface for own in network.interfaces()):
            # It joins only so that the connectivity check names the interface on all launchers.
            config = replace(config, seconds=min(config.seconds, _SECONDS_TO_FAIL))
        self._config = config
        self._token = secrets.token_hex(8)
        self._watch: StoreWatch | None = None
        self._endpoint = enter(config, check)
        self.keys = RendezvousKeys(self._endpoint.store, check)
        self._cards: tuple[Card, ...] = ()
        #: Of the launch.
        self.common = Common.new(config.count * own.ranks, stamp)
        here = tuple(own.address for own in offers(network.interfaces()))
        loopback = config.directory is None and network.listens_locally(config.address)
        #: For the rounds whose launcher 0 this is.
        self.server = CoordinatorServer(loopback=loopback, addresses=here)
        #: Number of this round, and of the one that this launcher joins.
        self.number, self._joining = 0, 1
        #: Number of this round's first generation.
        self.generation = 0
        #: The launchers of this round.
        self.membership = Membership.alone(own.ranks)
        try:
            with self._store_errors():
                self._join((), self._approach())
        except BaseException:
            self.close()
            raise
        if config.fixed:
            self._endpoint.stop_announcing()

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise one clear error if the store is gone; its host stays until others have read the reason."""
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
        return self._config.fixed

    @property
    def least(self) -> int | None:
        """How many launchers a round needs; `None` where there is no other round."""
        return self._config.least

    @property
    def replicas(self) -> int | None:
        """Replicas of a run that names no number: as many as there may ever be ranks; `None` if fixed."""
        return None if self.fixed else self.common.replicas

    @property
    def launcher_0(self) -> CoordinatorServer | ServerAddress:
        """Address of launcher 0 of this round; its server, where it is this launcher."""
        return self.server if self.membership.index == 0 else self._cards[0].address

    @property
    def survives_host(self) -> bool:
        """Whether the launch continues without the host of the store: there is none where it is a file."""
        return self._config.directory is not None

    def next(self, staying: Sequence[int], generation: int, *, lost_coordinator: bool) -> None:
        """Join the next round.

        Args:
            staying: launchers of this round that are expected.
            generation: number of the next generation.
            lost_coordinator: whether this launcher has lost launcher 0, without a decision.

        Raises:
            NotNeeded: if the launch ends before there was a place for this launcher.
            UnreachableError: if nodes cannot reach each other, again and again.
            WorldError: if too few join.
        """
        self._close_watch()
        self.generation = generation
        expected = tuple(self._cards[index].token for index in staying)
        with self._store_errors():
            if lost_coordinator:
                over = self._approach()
            else:
                over = self.number if self._token in expected else self.number - 1
            self._join(expected, over)

    def _approach(self) -> int:
        """Wait until the round that continues can be reached, or is over; return the last that is over.

        Raises:
            UnreachableError: if this node stays cut off.
            WorldError: as for `_newest`.
        """
        deadline = time.monotonic() + self._config.seconds
        while True:
            self.keys.check()
            self.keys.check_over()
            newest = self._newest()
            index = self.membership.index if newest == self.number else -1
            if newest == 0 or self.keys.has_ended(newest, index):
                return newest
            if self.keys.reaches(newest):
                return newest - 1
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{self._own.name} is cut off: launcher 0 of round {newest} lives, and could not "
                    f"be reached from here within {self._config.seconds:g} s",
                    hint="look at the network between this node and the others",
                )
            time.sleep(_APPROACH_SECONDS)

    def _newest(self) -> int:
        """Return the number of the newest round, 0 before the first; take the launch's constants from it.

        Raises:
            WorldError: if this launcher does not fit it, or the only round has begun without it.
        """
        newest, cards = self.keys.newest()
        first = cards[:1]
        if cards:
            self.common = cards[0].common
        elif not self.fixed:  # in a fixed launch, the members of the round compare each other
            first = tuple(self.keys.cards(1)[:1])
        error = _differing((*first, self._card()))
        if error is not None:
            raise error
        if newest > 0 and self.fixed:
            raise WorldError(
                f"{self._config.count} nodes have joined at {self._config.place} already; "
                "expected this one among them",
                hint="another launch uses this rendezvous: give each an --rdzv-id of its own",
            )
        return newest

    def _join(self, expected: tuple[str, ...], over: int) -> None:
        """Take part in a round.

        Args:
            expected: tokens of launchers that are on their way, once the round `over` is.
            over: the last round that is over; a later one is in progress.
        """
        tries = 0
        while True:
            newest = self._newest()
            may_close, number = newest <= over, newest + 1
            self._joining = number
            cards = Join(
                self.keys,
                number,
                self._card(),
                expected if may_close else (),
                may_close=may_close,
                config=self._config,
                hint=self._hint,
            ).wait()
            if cards is None:
                continue
            try:
                return self._take_part(number, cards)
            except UnreachableError:
                self._close_watch()
                # A launcher has gone since the round has started, or the network has.
                tries += 1
                if self.fixed or tries == _TRIES:
                    raise
                expected, over = (), number

    def _hint(self) -> str:
        """Return the hint for missing launchers."""
        if not self.fixed:
            return "--nnodes MIN:MAX says how many must come, --join-timeout how long they may take"
        return missing_hint(self._config, hosts=self._endpoint.hosts)

    def _card(self) -> Card:
        if self.number:
            index = self.membership.index
        elif self._config.index is not None:
            index = self._config.index
        else:
            index = 0 if self._endpoint.hosts else self._config.count
        return Card(
            token=self._token,
            node=self._node,
            launcher=self._own,
            common=self.common,
            address=self.server.address,
            round=self.number,
            index=index,
            generation=self.generation,
        )

    def _take_part(self, number: int, cards: tuple[Card, ...]) -> None:
        """Become a member of a round, after its connectivity check."""
        error = _differing(cards)
        if error is not None:
            self.keys.fail(number, error)
            self.keys.check_failed(number)
        index = [card.token for card in cards].index(self._token)
        if index == 0 and not self.fixed:
            room = self._config.count - len(cards)
            self._watch = StoreWatch(self.keys, number, self.server, room=room)
        launchers = [card.launcher for card in cards]
        names = tuple(
            f"node {number} ({launcher.name})" for number, launcher in enumerate(launchers)
        )
        nodes = node_numbers([card.node.host for card in cards])
        reach: tuple[Reach, ...] = ()
        if len(set(nodes)) > 1:
            reach = check_connectivity(
                self.keys.network(number),
                index=index,
                labels=names,
                interface=self._interface,
                patience=_PATIENCE if self.fixed else _ROUND_PATIENCE,
                check=self.keys.check,
            )
        self.membership = Membership(
            index=index,
            ranks=tuple(launcher.ranks for launcher in launchers),
            nodes=tuple(nodes),
            names=names,
            address=reach[0].address if reach else network.LOOPBACK,
            interface=reach[index].interface if reach else None,
            own_cores=owns(index, nodes, [launcher.cpus for launcher in launchers]),
            own_gpus=owns(index, nodes, [launcher.gpus for launcher in launchers]),
            overrules_interface=self._interface is not None,
            reached_at=tuple(map(str, reach)),
            speaks=index == 0 or not self._config.shares_output,
        )
        self.number, self._cards, self.common = number, cards, cards[0].common
        self.generation = max(card.generation for card in cards)
        if index == 0:
            which = "" if self.fixed else f" round {number}:"
            self._say(f"lockstep:{which} {self.membership}")

    def end(self) -> None:
        """Write that the launch is over, for those that wait for a place."""
        self.keys.end()

    def close(self) -> None:
        """Close the endpoint, which removes its file, and the server."""
        self._close_watch()
        self._endpoint.close()
        self.server.close()

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _differing(cards: Sequence[Card]) -> WorldError | None:
    """Return the error of launchers that have other libraries than the first of them."""
    for card in cards[1:]:
        text = differing_versions(
            *(card.launcher.name, card.node.versions),
            *(cards[0].launcher.name, cards[0].node.versions),
        )
        if text is not None:
            return WorldError(text, hint=HINTS["versions"])
    return None
