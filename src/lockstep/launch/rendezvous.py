"""Rendezvous of launchers: one on the loopback interface, or several over the network.

Every generation has a store of its own, on a port that the system chooses. Workers of one generation
never see keys of another, not even scripts that know nothing of generations: torchrun 2.13 keeps one
store, and Gloo then hangs on addresses of the dead.

    round 1: generations 0, 1, 2   a launcher comes, or is gone   round 2: generation 3 …
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

from torch.distributed import HashStore, TCPStore

from lockstep.errors import WorldError
from lockstep.launch.nodes.client import CoordinatorClient, RoundOverError
from lockstep.launch.nodes.config import port_taken
from lockstep.launch.nodes.coordinator import Policy
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.rounds import Rounds
from lockstep.launch.nodes.server import CoordinatorServer
from lockstep.launch.plan import Generation
from lockstep.world import network
from lockstep.world.rendezvous.store import connect_store, host_store
from lockstep.world.waiting import Check, go_on

_LOOK_SECONDS = 0.5
_PAUSE = 0.05
#: How long it may take to find out that launcher 0 is lost, or to be told why a store is gone.
_LOSS_SECONDS = 20.0
_HOST_HINT = (
    "launchers that meet in a shared directory survive it: --rdzv-endpoint file:///DIRECTORY"
)


class Rendezvous:
    """A rendezvous of launchers that have gathered, or of one that is alone.

    Args:
        common: what all generations of the launch have in common.
        ranks: number of ranks of this launcher.
        rounds: of the launchers' rendezvous; `None` for a single launcher.
        port: where this launcher hosts each generation's store; 0 for a port that the system chooses.
        check: called again and again while others are waited for.

    Attributes:
        policy: which failures are followed by new workers, where this launcher decides for all.
    """

    def __init__(
        self,
        common: Generation,
        ranks: int,
        rounds: Rounds | None = None,
        *,
        port: int = 0,
        check: Check = go_on,
    ) -> None:
        self._common = common
        self._port = port
        self._rounds = rounds
        self._alone = Membership.alone(ranks)
        self._store: TCPStore | HashStore | None = None
        self._watch: _Watch | None = None
        self._has_begun = False
        #: The agent, which starts the workers, knows better.
        self.policy: Policy = lambda _: None
        self.check = check
        #: The other launchers, while a round continues; `None` for a launcher that is alone.
        self.coordinator: CoordinatorClient | None = None
        #: Number of this generation; -1 before the first.
        self.generation = -1

    @property
    def membership(self) -> Membership:
        """The launchers of this round."""
        return self._alone if self._rounds is None else self._rounds.membership

    @property
    def replicas(self) -> int | None:
        """How many replicas a run has that names no number; `None` leaves its number of ranks."""
        return None if self._rounds is None else self._rounds.replicas

    @property
    def may_leave(self) -> bool:
        """Whether the others continue without this launcher."""
        return self._rounds is not None and not self._rounds.fixed and self.membership.count > 1

    @property
    def store(self) -> TCPStore | HashStore:
        """The store of this generation."""
        assert self._store is not None, "there is one from the first rendezvous on"
        return self._store

    def next_generation(self) -> Generation:
        """Open the store of the next generation, with which the one before ends.

        Its port is 0 for a store that workers do not find.

        Raises:
            RoundOverError: if the launch ends instead.
            WorldError: if another rendezvous fails.
        """
        self._store = None
        port = self._open() if self._rounds is None else self._enter()
        return replace(
            self._common,
            number=self.generation,
            membership=self.membership,
            port=port,
            replicas=self.replicas,
        )

    def _open(self) -> int:
        """Open a store; return its port, 0 for one that is this launcher's alone."""
        if self._rounds is None:
            self.generation += 1
        if not self._common.listens:
            self._store = HashStore()
            return 0
        try:
            store = host_store(self._port, loopback=self.membership.address == network.LOOPBACK)
        except OSError as error:
            raise port_taken(self._port, network.reason(error)) from error
        self._store = store
        return int(store.port)

    def _enter(self) -> int:
        """Begin a generation with the others; return the port of its store."""
        while True:
            if self.coordinator is not None:
                self._meet_again(self.coordinator)
            if self.coordinator is None and not self._watch_each_other():
                continue
            assert self.coordinator is not None
            self.generation = self._next
            # Once the launch has begun, it does not depend on the store of the launchers' rendezvous.
            check = self.check if self._has_begun else self._check_all
            try:
                port = self.coordinator.enter(self.generation, self._open, check)
            except RoundOverError as over:
                if over.decision.kind != "round":
                    raise
                continue
            self._has_begun = True
            if self._store is None and not self._connect(self.coordinator, port):
                continue
            return port

    def _check_all(self) -> None:
        self.check()
        if self._rounds is not None:
            self._rounds.check_failed()

    def _connect(self, client: CoordinatorClient, port: int) -> bool:
        """Connect to the store that launcher 0 has opened; return whether it is still there.

        Raises:
            WorldError: if it cannot be reached, and launcher 0 can.
        """
        try:
            self._store = connect_store(self.membership.address, port)
        except WorldError:
            deadline = time.monotonic() + _LOSS_SECONDS
            while client.decision is None:
                self.check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
            return False
        return True

    @property
    def _next(self) -> int:
        """Number of the next generation."""
        first = 0 if self._rounds is None else self._rounds.generation
        return max(first, self.generation + 1)

    def _meet_again(self, client: CoordinatorClient) -> None:
        """Begin another round, if this one is over."""
        decision = client.decision
        if decision is None or decision.kind != "round":
            return
        assert self._rounds is not None
        lost_coordinator = client.has_lost_coordinator
        self._close_round()
        self._rounds.next(decision.staying, self.generation + 1, lost_coordinator=lost_coordinator)

    def _watch_each_other(self) -> bool:
        """Reach the others of this round; return whether launcher 0 has opened it."""
        rounds, membership = self._rounds, self.membership
        assert rounds is not None
        place = rounds.hear_place() if membership.index > 0 else None
        if membership.index > 0 and place is None:
            rounds.give_up()
            return False
        self.coordinator = CoordinatorClient(
            membership,
            place,
            generation=max(rounds.generation, self.generation),
            policy=self.policy,
            least=rounds.least,
            hint=None if rounds.fixed or rounds.survives_host else _HOST_HINT,
        )
        if membership.index == 0:
            rounds.tell_place(self.coordinator.place)
            if not rounds.fixed and self.coordinator.server is not None:
                self._watch = _Watch(rounds, self.coordinator.server)
        return True

    def _close_round(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None

    def finish(self) -> None:
        """Leave the others in good order, and end the launch if it is over for all."""
        decision = None if self.coordinator is None else self.coordinator.decision
        self._close_round()
        self._store = None
        over = decision is not None and decision.kind in ("end", "done")
        if over and self._rounds is not None and self.membership.index == 0:
            with contextlib.suppress(RuntimeError):  # the store is gone: the verdict stands
                self._rounds.end()


class _Watch:
    """Launcher 0's look at the rendezvous: launchers that have joined, and that have lost it.

    Args:
        rounds: the rounds of the launch.
        server: where the launchers of this round are heard.
    """

    def __init__(self, rounds: Rounds, server: CoordinatorServer) -> None:
        self._rounds, self._server = rounds, server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        losses = 0
        while not self._stop.wait(_LOOK_SECONDS):
            # A shared directory may be out of reach for a while: the round continues meanwhile.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                lost = self._rounds.answer_losses(losses)
                losses += len(lost)
                superseded, newcomers = self._rounds.is_superseded(), self._rounds.newcomers()
                with self._server.locked() as coordinator:
                    for index in lost:
                        if index > 0:
                            coordinator.lose(index, time.monotonic())
                    if superseded:
                        coordinator.supersede()
                    coordinator.welcome(newcomers)

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(2 * _LOOK_SECONDS)
