"""How the launchers of a launch meet: alone on the loopback interface, or several over the network.

Every generation has a store of its own, on a port that the system chooses. Workers of one generation
never see keys of another, not even scripts that know nothing of generations: torchrun 2.13 keeps one
store, and Gloo then hangs on addresses of the dead.

    round 1: generations 0, 1, 2   a launcher comes, or is gone   round 2: generation 3 …
"""

from __future__ import annotations

import contextlib
import threading
import time

from torch.distributed import HashStore, TCPStore

from lockstep.errors import WorldError
from lockstep.launch.coordinator import Policy
from lockstep.launch.coordinator_client import CoordinatorClient, RoundOverError
from lockstep.launch.coordinator_server import CoordinatorServer
from lockstep.launch.elastic_rendezvous import ElasticRendezvous
from lockstep.launch.fixed_rendezvous import FixedRendezvous
from lockstep.launch.membership import Membership
from lockstep.launch.nodes import port_taken
from lockstep.world import port_discovery
from lockstep.world.meet import LOOPBACK, connect_store, host_store
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
        run_id: name of the launch.
        ranks: number of ranks of this launcher.
        meeting: the launchers that have met, once or in rounds; `None` for one that is alone.
        port: where this launcher hosts each generation's store; 0 for a port that the system chooses.
        listens: whether workers find a store at a port; those of several launchers always do.
        policy: which failures are followed by new workers, where this launcher decides for all.
        check: called again and again while others are waited for.
    """

    def __init__(
        self,
        run_id: str,
        ranks: int,
        meeting: FixedRendezvous | ElasticRendezvous | None = None,
        *,
        port: int = 0,
        listens: bool = True,
        policy: Policy = lambda _: None,
        check: Check = go_on,
    ) -> None:
        self.run_id = run_id
        self._port = port
        self._meeting = meeting
        self._alone = Membership.alone(ranks)
        self._listens = listens or meeting is not None
        self._store: TCPStore | HashStore | None = None
        self._watch: _Watch | None = None
        #: See the arguments; whoever starts the workers knows better.
        self.policy, self.check = policy, check
        #: The other launchers, while a round goes on; `None` for a launcher that is alone.
        self.neighbours: CoordinatorClient | None = None
        #: Number of this generation; -1 before the first.
        self.generation = -1

    @property
    def roster(self) -> Membership:
        """The launchers of this round."""
        return self._alone if self._meeting is None else self._meeting.roster

    @property
    def replicas(self) -> int | None:
        """How many replicas a run has that names no number; `None` leaves its number of ranks."""
        return self._meeting.replicas if isinstance(self._meeting, ElasticRendezvous) else None

    @property
    def may_leave(self) -> bool:
        """Whether the others go on without this launcher."""
        return isinstance(self._meeting, ElasticRendezvous) and self.roster.count > 1

    @property
    def store(self) -> TCPStore | HashStore:
        """The store of this generation."""
        assert self._store is not None, "there is one from the first rendezvous on"
        return self._store

    def next_generation(self) -> int:
        """Open the store of the next generation, with which the one before ends; return its port.

        The port is 0 for a store that workers do not find.

        Raises:
            RoundOverError: if the launch ends instead.
            WorldError: if the launchers cannot meet again.
        """
        self._store = None
        return self._open() if self._meeting is None else self._enter()

    def _open(self) -> int:
        """Open a store; return its port, 0 for one that is this launcher's alone."""
        if self._meeting is None:
            self.generation += 1
        if not self._listens:
            self._store = HashStore()
            return 0
        try:
            store = host_store(self._port, loopback=self.roster.address == LOOPBACK)
        except OSError as error:
            raise port_taken(self._port, port_discovery.reason(error)) from error
        self._store = store
        return int(store.port)

    def _enter(self) -> int:
        """Begin a generation with the others; return the port of its store."""
        while True:
            if self.neighbours is not None:
                self._meet_again(self.neighbours)
            if self.neighbours is None and not self._watch_each_other():
                continue
            assert self.neighbours is not None
            self.generation = self._next
            try:
                port = self.neighbours.enter(self.generation, self._open, self.check)
            except RoundOverError as over:
                if over.decision.kind != "round":
                    raise
                continue
            if self._store is None and not self._connect(self.neighbours, port):
                continue
            return port

    def _connect(self, neighbours: CoordinatorClient, port: int) -> bool:
        """Connect to the store that launcher 0 has opened; return whether it is still there.

        Raises:
            WorldError: if it cannot be reached, and launcher 0 can.
        """
        try:
            self._store = connect_store(self.roster.address, port)
        except WorldError:
            deadline = time.monotonic() + _LOSS_SECONDS
            while neighbours.decision is None:
                self.check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
            return False
        return True

    @property
    def _next(self) -> int:
        """Number of the next generation."""
        first = self._meeting.generation if isinstance(self._meeting, ElasticRendezvous) else 0
        return max(first, self.generation + 1)

    def _meet_again(self, neighbours: CoordinatorClient) -> None:
        """Begin another round, if this one is over."""
        decision = neighbours.decision
        if decision is None or decision.kind != "round":
            return
        assert isinstance(self._meeting, ElasticRendezvous)
        lost_chair = neighbours.has_lost_chair
        self._close_round()
        self._meeting.next(decision.staying, self.generation + 1, lost_chair=lost_chair)

    def _watch_each_other(self) -> bool:
        """Reach the others of this round; return whether launcher 0 has opened it."""
        meeting, roster = self._meeting, self.roster
        assert meeting is not None
        place, hint, least, first = None, None, None, 0
        if roster.index > 0:
            place = meeting.hear_place()
        if isinstance(meeting, ElasticRendezvous):
            if roster.index > 0 and place is None:
                meeting.give_up()
                return False
            hint = None if meeting.survives_host else _HOST_HINT
            least, first = meeting.least, meeting.generation
        self.neighbours = CoordinatorClient(
            roster,
            place,
            generation=max(first, self.generation),
            policy=self.policy,
            least=least,
            hint=hint,
        )
        if roster.index == 0:
            meeting.tell_place(self.neighbours.place)
            if isinstance(meeting, ElasticRendezvous) and self.neighbours.hall is not None:
                self._watch = _Watch(meeting, self.neighbours.hall)
        return True

    def _close_round(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.neighbours is not None:
            self.neighbours.close()
            self.neighbours = None

    def finish(self) -> None:
        """Leave the others in good order, and end the launch if it is over for all."""
        decision = None if self.neighbours is None else self.neighbours.decision
        self._close_round()
        self._store = None
        over = decision is not None and decision.kind in ("end", "done")
        if over and isinstance(self._meeting, ElasticRendezvous) and self.roster.index == 0:
            self._meeting.end()


class _Watch:
    """Launcher 0's look at where launchers meet: who has come, and who has lost it.

    Args:
        rounds: the rounds of the launch.
        hall: where the launchers of this round are heard.
    """

    def __init__(self, rounds: ElasticRendezvous, hall: CoordinatorServer) -> None:
        self._rounds, self._hall = rounds, hall
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        doubts = 0
        while not self._stop.wait(_LOOK_SECONDS):
            # A shared directory may be out of reach for a while: the round goes on meanwhile.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                for index in self._rounds.answer_doubts(doubts):
                    doubts += 1
                    if index > 0:
                        self._hall.lose(index)
                if self._rounds.is_superseded():
                    self._hall.supersede()
                self._hall.welcome(self._rounds.newcomers())

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(2 * _LOOK_SECONDS)
