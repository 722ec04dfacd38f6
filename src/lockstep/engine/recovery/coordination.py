"""Agreement of all ranks on the step after which they save, take a snapshot or end.

Ranks of one launcher read its status page at every point: rank 0 names the next step there. No rank has
done that step yet, since none gets through a step without rank 0, which comes to it later. With a
staleness K ranks may be K steps ahead of rank 0, which names the first step beyond.

Ranks of several launchers, or of none, have only the store, and to read it at each point costs too much.
A rank with a request writes it to the store. The watchdog's thread of every rank reads the store now and
then; where it finds a request, the main thread begins to read at every point, and the rank writes that it
does. Once all do, rank 0 names the next step. A run without requests reads only a flag.
"""

from __future__ import annotations

import abc
from typing import Literal

import torch.distributed as dist

from lockstep.state.checkpoint.shared_memory import StatusPage

Request = Literal["snapshot", "save", "stop"]


#: Requests by strength: a later one includes those before it.
_REQUESTS: tuple[Request | None, ...] = (None, "snapshot", "save", "stop")


class Coordination(abc.ABC):
    """Brings all ranks to one step."""

    def __init__(self) -> None:
        self._request: Request | None = None

    def ask(self, request: Request) -> None:
        """Ask for the next step that all can agree on; from a signal handler, too."""
        self._request = _stronger(self._request, request)

    @property
    @abc.abstractmethod
    def stop_is_asked(self) -> bool:
        """Whether a rank is asked to end the run, as far as this rank has read."""

    @abc.abstractmethod
    def at_point(self, steps: int) -> Request | None:
        """Return what all ranks do now, after `steps` updates; every rank calls it at every point."""


def _stronger(one: Request | None, other: Request) -> Request:
    return other if _REQUESTS.index(one) < _REQUESTS.index(other) else one or other


class Alone(Coordination):
    """Coordination of a single rank."""

    @property
    def stop_is_asked(self) -> bool:
        """Whether this rank is asked to end the run."""
        return self._request == "stop"

    def at_point(self, steps: int) -> Request | None:
        """Return the request."""
        request, self._request = self._request, None
        return request


class OnStatusPage(Coordination):
    """Coordination through the status page of the one launcher of all ranks.

    `leads` says whether this is rank 0, and `ahead` by how many steps another rank may be ahead of it.
    """

    def __init__(self, page: StatusPage, *, leads: bool, ahead: int = 0) -> None:
        super().__init__()
        self._page, self._leads, self._next = page, leads, ahead + 1
        self._done = self._named = 0

    @property
    def stop_is_asked(self) -> bool:
        """Whether a rank is asked to end the run; writes this rank's request to the page."""
        self._write_request()
        at, what = self._page.agreed
        agreed = what if at > self._done else 0
        return _REQUESTS.index("stop") in (self._page.asked, agreed)

    def _write_request(self) -> None:
        if self._request is not None:
            # At every point until all agree on it: rank 0 may be clearing another rank's request.
            self._page.asked = max(self._page.asked, _REQUESTS.index(self._request))

    def at_point(self, steps: int) -> Request | None:
        """Return what all ranks do now, after `steps` updates; every rank calls it at every point."""
        at, what = self._page.agreed
        if self._done < at <= steps:
            self._done = steps
            if self._request != "stop":
                self._request = None
            return _REQUESTS[what]
        self._write_request()
        # Not while others may still read the agreement before.
        is_past = steps >= max(self._named, self._done + self._next)
        if self._leads and self._page.asked and is_past:
            self._named = steps + self._next
            self._page.agreed = (self._named, self._page.asked)
            self._page.asked = 0
        return None


class ThroughStore(Coordination):
    """Coordination through the store, of ranks of several launchers, or of none.

    `store` is a client of its own, and `ahead` is by how many steps another rank may be ahead of rank 0.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, ahead: int = 0) -> None:
        super().__init__()
        self._rank, self._size, self._next = rank, size, ahead + 1
        self._turn = 0
        # The turn that the thread has found; the other ranks read that the main thread heeds it.
        self._ready: int | None = None
        self._store = store

    @property
    def stop_is_asked(self) -> bool:
        """Whether a rank is asked to end the run."""
        turn = self._ready
        return turn is not None and self._store.check([f"{turn}/stop"])

    def at_point(self, steps: int) -> Request | None:
        """Return what all ranks do now, after `steps` updates; every rank calls it at every point."""
        turn = self._ready
        if turn is None:
            return None
        at = f"{turn}/at"
        if not self._store.check([at]):
            everybody = [f"{turn}/ready/{rank}" for rank in range(self._size)]
            if self._rank == 0 and self._store.check(everybody):
                self._store.set(at, str(steps + self._next))
                self._store.get(at)  # answered when it is there: before this rank begins the step
            return None
        if steps < int(self._store.get(at)):
            return None
        asked = (
            request for request in ("stop", "save") if self._store.check([f"{turn}/{request}"])
        )
        agreed: Request = next(asked, "snapshot")  # type: ignore[arg-type]
        if _stronger(self._request, agreed) == agreed:
            self._request = None  # a request that came too late for this turn is for the next
        self._turn, self._ready = turn + 1, None
        return agreed

    def look(self) -> None:
        """Read requests of other ranks, and write this rank's; called now and then, in another thread."""
        # In this order: while nothing is ready, the main thread leaves the turn alone.
        if self._ready is not None:
            return
        turn, request = self._turn, self._request
        if request is not None:
            self._store.set(f"{turn}/{request}", "1")
            self._store.set(f"{turn}/asked", "1")
        if self._store.check([f"{turn}/asked"]):
            # In this order: what the others read must be true already.
            self._ready = turn
            self._store.set(f"{turn}/ready/{self._rank}", "1")
