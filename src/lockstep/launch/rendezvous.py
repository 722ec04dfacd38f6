"""How the launchers of a launch meet: alone on the loopback interface, or several over the network.

Every generation has a store of its own, on a port that the system chooses. Workers of one generation
never see keys of another, not even scripts that know nothing of generations: torchrun 2.13 keeps one
store, and Gloo then hangs on addresses of the dead.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lockstep.launch.gathering import Gathering
from lockstep.launch.roster import Roster
from lockstep.world.meet import LOOPBACK, connect_store, host_store


class Rendezvous(RendezvousHandler):
    """A rendezvous of launchers that have gathered, or of one that is alone.

    Args:
        run_id: name of the launch.
        ranks: number of ranks of this launcher.
        gathering: the launchers that have met; `None` for one that is alone.
    """

    def __init__(self, run_id: str, ranks: int, gathering: Gathering | None = None) -> None:
        self._run_id = run_id
        self._gathering = gathering
        self.roster = Roster.alone(ranks) if gathering is None else gathering.roster
        self._generation = 0
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are clients of the store made here: always."""
        return True

    @property
    def store(self) -> TCPStore:
        """The store of this generation."""
        assert self._store is not None, "there is one from the first rendezvous on"
        return self._store

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next generation; the one before ends with it."""
        roster = self.roster
        self._store = self._open()
        place = RendezvousStoreInfo(roster.address, self._store.port)
        self._generation += 1
        agents = PrefixStore("lockstep/agent", self._store)
        return RendezvousInfo(agents, roster.index, roster.count, place)

    def _open(self) -> TCPStore:
        loopback = self.roster.address == LOOPBACK
        if self._gathering is None:
            return host_store(0, loopback=loopback)
        key = f"generation/{self._generation}"
        if self.roster.index == 0:
            store = host_store(0, loopback=loopback)
            self._gathering.tell(key, str(store.port))
            return store
        return connect_store(self.roster.address, int(self._gathering.hear(key)))

    def is_closed(self) -> bool:
        """Return whether the launch is over."""
        return self._closed

    def set_closed(self) -> None:
        """Say that the launch is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many launchers wait to join: none may."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        self._closed = True
        return True
