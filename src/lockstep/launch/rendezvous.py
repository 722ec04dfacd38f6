"""How the agents of a launch meet: on one node, at a store on the loopback interface."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=5)


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one agent: every round has a store of its own, on a port the system chooses.

    Workers of one generation never see keys of another, not even scripts that know nothing of
    generations: torchrun 2.13 keeps one store, and Gloo then hangs on addresses of the dead.

    Args:
        run_id: name of the launch.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are clients of the store made here: always."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next generation; the one before ends with it."""
        self._store = TCPStore(
            _LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT
        )
        meeting_point = RendezvousStoreInfo(_LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("lockstep/agent", self._store), 0, 1, meeting_point)

    def is_closed(self) -> bool:
        """Return whether the launch is over."""
        return self._closed

    def set_closed(self) -> None:
        """Say that the launch is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many agents wait to join: none, a node is alone."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        self._closed = True
        return True
