"""`Rounds`: rendezvous rounds of a launch on several nodes; each change of launchers starts one.

A round is a period in which the same launchers take part in the launch:

approach ── join ── the round starts ── connectivity check ── membership ── coordinator and clients
└─ is a round in progress, and can its launcher 0 be reached?

A launch of a fixed size has one round, which needs all launchers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lockstep.errors import UnreachableError, WorldError
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.endpoint import enter, missing_hint
from lockstep.launch.nodes.join import Join
from lockstep.launch.nodes.keys import JoinEntry, RendezvousKeys
from lockstep.launch.nodes.membership import Common, Launcher, Membership, owns
from lockstep.launch.nodes.server import CoordinatorServer, ServerAddress
from lockstep.world import network
from lockstep.world.rendezvous.connectivity_check import check_connectivity, offers
from lockstep.world.rendezvous.membership_check import (
    HINTS,
    NodeInfo,
    differing_versions,
    node_numbers,
)

_APPROACH_SECONDS = 1.0
#: Seconds between two reads of the store by launcher 0.
_POLL_SECONDS = 0.5
#: Maximum number of rounds that fail in a row because nodes cannot connect to each other.
_TRIES = 3
#: Seconds that a launcher may delay the connectivity check: in a launch of a fixed size, and in an elastic
#: launch, where another round can follow.
_PATIENCE, _ROUND_PATIENCE = 30.0, 4.0
#: Seconds that a launcher with a wrong network interface waits for others, to end their launch too.
_SECONDS_TO_FAIL = 20.0
#: Number of connections of a rank to the workers' store.
_STORE_CLIENTS = 4


class Rounds:
    """Takes part in the rendezvous rounds of a launch, on behalf of one launcher.

    A round is a period in which the same launchers take part in the launch.

    Args:
        interface: network interface that the user chose.
        check: called repeatedly during waits for other launchers.
        stamp: name of the directory of the run to resume, used if this launcher is the first.

    Raises:
        LaunchEnded: if the launch ends while this launcher waits to join.
        UnreachableError: if nodes cannot reach each other.
        WorldError: if this launcher does not fit the launch, or too few launchers join.
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
            # Join anyway: the connectivity check then reports the interface on all launchers.
            config = replace(config, seconds=min(config.seconds, _SECONDS_TO_FAIL))
        if config.index in (None, 0):
            # It may become launcher 0, to which all launchers and ranks connect.
            ranks = _STORE_CLIENTS * config.needed * own.ranks
            network.require_files(config.needed - 1, ranks)
        self._config = config
        self._token = secrets.token_hex(8)
        #: Closes the `StoreWatch` of the current round, which launcher 0 of an elastic launch has.
        self._watch = contextlib.ExitStack()
        self._endpoint = enter(config, check)
        self.keys = RendezvousKeys(self._endpoint.store, check)
        self._cards: tuple[JoinEntry, ...] = ()
        #: Constants of the launch.
        self.common = Common.new(config.count * own.ranks, stamp)
        here = tuple(own.address for own in offers(network.interfaces()))
        loopback = config.directory is None and network.listens_locally(config.address)
        #: Server of the coordinator, used while this launcher is launcher 0.
        self.server = CoordinatorServer(loopback=loopback, addresses=here)
        #: Number of the current round, and of the round that this launcher joins.
        self.number, self._joining = 0, 1
        #: Number of starts of workers before this round.
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
        """Context manager: turn errors of a lost rendezvous store into a `WorldError` with a hint."""
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
        """Whether the launch has a fixed number of launchers, and so a single round."""
        return self._config.fixed

    @property
    def least(self) -> int | None:
        """Minimum number of launchers of an elastic launch; `None` for a launch of a fixed size."""
        return self._config.least

    @property
    def replicas(self) -> int | None:
        """Default number of logical data-parallel workers in an elastic launch; `None` for a fixed size."""
        return None if self.fixed else self.common.replicas

    @property
    def launcher_0(self) -> CoordinatorServer | ServerAddress:
        """Address of launcher 0 in this round; the server itself if this launcher is launcher 0."""
        return self.server if self.membership.index == 0 else self._cards[0].address

    @property
    def survives_host(self) -> bool:
        """Whether the launch survives the loss of any node: its store is a file in a shared directory."""
        return self._config.directory is not None

    def next(self, staying: Sequence[int], generation: int, *, lost_coordinator: bool) -> None:
        """Join the next rendezvous round, after the set of launchers has changed.

        Args:
            staying: indices of launchers of this round that are expected to join.
            generation: number of the next start of workers.
            lost_coordinator: whether this launcher lost the connection to launcher 0.

        Raises:
            LaunchEnded: if the launch ends while this launcher waits to join.
            UnreachableError: if nodes cannot reach each other in several rounds.
            WorldError: if too few launchers join.
        """
        self._watch.close()
        self.generation = generation
        expected = tuple(self._cards[index].token for index in staying)
        with self._store_errors():
            if lost_coordinator:
                over = self._approach()
            else:
                over = self.number if self._token in expected else self.number - 1
            self._join(expected, over)

    def _approach(self) -> int:
        """Wait until this launcher may join a rendezvous round.

        Returns the number of the last round that has ended, 0 before any. While a round is in progress, its
        launcher 0 lets new launchers in.

        Raises:
            UnreachableError: if launcher 0 runs and this node cannot connect to it.
            WorldError: if this launcher has different library versions, or the launch is full.
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
        """Return the number of the newest rendezvous round, or 0; check that this launcher may join.

        The attribute `common` is set to the constants that the first launcher has chosen for all.

        Raises:
            WorldError: if this launcher has different library versions, or the launch is full.
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
        """Join the next rendezvous round; if its nodes cannot connect to each other, join another round.

        Args:
            expected: tokens of launchers that are known to join.
            over: number of the last round that is over.
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
                hint=functools.partial(missing_hint, self._config, hosts=self._endpoint.hosts),
            ).wait()
            if cards is None:
                continue
            try:
                return self._take_part(number, cards)
            except UnreachableError:
                self._watch.close()
                # A launcher or the network failed after the start of the round: try another round.
                tries += 1
                if self.fixed or tries == _TRIES:
                    raise
                expected, over = (), number

    def _card(self) -> JoinEntry:
        if self.number:
            index = self.membership.index
        elif self._config.index is not None:
            index = self._config.index
        else:
            index = 0 if self._endpoint.hosts else self._config.count
        return JoinEntry(
            token=self._token,
            node=self._node,
            launcher=self._own,
            common=self.common,
            address=self.server.address,
            round=self.number,
            index=index,
            generation=self.generation,
        )

    def _take_part(self, number: int, cards: tuple[JoinEntry, ...]) -> None:
        """Run the connectivity check of rendezvous round `number`, and set the membership in it.

        `cards` are the entries of the round's launchers.
        """
        error = _differing(cards)
        if error is not None:
            self.keys.fail(number, error)
            self.keys.check_failed(number)
        index = [card.token for card in cards].index(self._token)
        if index == 0 and not self.fixed:
            room = self._config.count - len(cards)
            watch = StoreWatch(self.keys, number, self.server, room=room)
            self._watch.callback(watch.close)
        launchers = [card.launcher for card in cards]
        names = tuple(
            f"node {number} ({launcher.name})" for number, launcher in enumerate(launchers)
        )
        nodes = node_numbers([card.node.host for card in cards])
        reach: tuple[network.Interface, ...] = ()
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
            interface=reach[index].name if reach else None,
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
        """Record in the store that the launch is over, for launchers that wait to join."""
        self.keys.end()

    def close(self) -> None:
        """Close the rendezvous store, and the server that receives reports of other launchers."""
        self._watch.close()
        self._endpoint.close()
        self.server.close()


class StoreWatch:
    """Thread of launcher 0 that polls the rendezvous store for launchers that join or are cut off.

    Args:
        number: number of the current round, a period with fixed launchers.
        room: number of launchers that may join before the launch has its maximum.
    """

    def __init__(
        self, keys: RendezvousKeys, number: int, server: CoordinatorServer, *, room: int
    ) -> None:
        self._keys, self._number, self._server, self._room = keys, number, server, room
        self._answered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            # A shared directory may be out of reach for a while: the round continues meanwhile.
            with contextlib.suppress(RuntimeError, OSError, ValueError, WorldError):
                self._look()

    def _look(self) -> None:
        # Do not answer if this launcher's main thread is blocked: another round begins without it.
        lost = (
            [] if self._server.is_silent else self._keys.answer_losses(self._number, self._answered)
        )
        self._answered += len(lost)
        superseded = self._keys.newest_number > self._number
        waiting: list[JoinEntry] = []
        with contextlib.suppress(WorldError):  # a new launcher has another version of Lockstep
            waiting = self._keys.cards(self._number + 1)[: self._room] if self._room else []
        with self._server.locked(self._number) as coordinator:
            if coordinator is None:
                return
            if superseded:
                coordinator.supersede()
            coordinator.note(lost, [card.launcher.name for card in waiting], time.monotonic())

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join(2 * _POLL_SECONDS)


def _differing(cards: Sequence[JoinEntry]) -> WorldError | None:
    """Return an error if a launcher has different library versions than the first one; else `None`.

    `cards` are the launchers' entries.
    """
    for card in cards[1:]:
        text = differing_versions(
            *(card.launcher.name, card.node.versions),
            *(cards[0].launcher.name, cards[0].node.versions),
        )
        if text is not None:
            return WorldError(text, hint=HINTS["versions"])
    return None
