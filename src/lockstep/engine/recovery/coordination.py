"""Agreement of all ranks on the step after which they save the state, take a snapshot or end the run.

A point is the moment after a batch, an epoch or `run.save` at which the state is complete.

Ranks of one launcher share its status page, a piece of memory. Rank 0 writes the number of the next step
there, and every rank reads the number at every point. No rank has finished that step, since no step ends
without rank 0. With staleness K (gradients of parameters that lack K updates) ranks may be K steps ahead of
rank 0, which then chooses the first step that no rank can have finished.

Ranks of several launchers, or of none, have only the key-value store, and a read at each point is too slow.
A rank with a request writes it to the store. The watchdog's thread of every rank polls the store. When the
thread finds a request, the main thread begins to read the store at every point, and the rank writes that
it is ready. When all ranks are ready, rank 0 chooses the next step. Without requests a rank only reads a
flag of its own process at a point.
"""

from __future__ import annotations

import abc
from typing import Literal

import torch.distributed as dist

from lockstep.state.checkpoint.shared_memory import StatusPage

Request = Literal["snapshot", "save", "stop"]


#: Requests in order of strength: each one includes the requests before it.
_REQUESTS: tuple[Request | None, ...] = (None, "snapshot", "save", "stop")


class Coordination(abc.ABC):
    """Agreement of all ranks on a step after which each of them saves the state or ends the run."""

    def __init__(self) -> None:
        self._request: Request | None = None

    def ask(self, request: Request) -> None:
        """Request that all ranks save or stop at the next possible step; signal handlers may call `ask`."""
        self._request = _stronger(self._request, request)

    @property
    @abc.abstractmethod
    def stop_is_asked(self) -> bool:
        """Whether this rank has read a request, its own or another rank's, to end the run."""

    @abc.abstractmethod
    def at_point(self, steps: int) -> Request | None:
        """Return the request (save, snapshot or stop) to carry out now, after `steps` updates, or `None`.

        Called after every batch, epoch and `run.save`; all ranks get the same request after the same step.
        """


def _stronger(one: Request | None, other: Request) -> Request:
    return other if _REQUESTS.index(one) < _REQUESTS.index(other) else one or other


class Alone(Coordination):
    """Coordination of a single rank, which carries out its own requests to save the state or stop."""

    @property
    def stop_is_asked(self) -> bool:
        """Whether this rank has a request to end the run."""
        return self._request == "stop"

    def at_point(self, steps: int) -> Request | None:
        """Return and clear this rank's request to save the state or to stop; `None` if there is none."""
        request, self._request = self._request, None
        return request


class OnStatusPage(Coordination):
    """Coordination of ranks of one launcher, through the status page, which is shared memory.

    `leads`: whether this is rank 0, which chooses steps. `ahead`: steps that a rank may be ahead of rank 0.
    """

    def __init__(self, page: StatusPage, *, leads: bool, ahead: int = 0) -> None:
        super().__init__()
        self._page, self._leads, self._next = page, leads, ahead + 1
        self._done = self._named = 0

    @property
    def stop_is_asked(self) -> bool:
        """Whether any rank has requested to end the run; writes this rank's request to the page."""
        self._write_request()
        at, what = self._page.agreed
        agreed = what if at > self._done else 0
        return _REQUESTS.index("stop") in (self._page.asked, agreed)

    def _write_request(self) -> None:
        if self._request is not None:
            # Written at every point until a step is agreed on, since rank 0 may clear it with another one.
            self._page.asked = max(self._page.asked, _REQUESTS.index(self._request))

    def at_point(self, steps: int) -> Request | None:
        """Return the request to carry out now, after `steps` updates, or `None`, the same on all ranks."""
        at, what = self._page.agreed
        if self._done < at <= steps:
            self._done = steps
            if self._request != "stop":
                self._request = None
            return _REQUESTS[what]
        self._write_request()
        # Other ranks may still have to read the previous agreement.
        is_past = steps >= max(self._named, self._done + self._next)
        if self._leads and self._page.asked and is_past:
            self._named = steps + self._next
            self._page.agreed = (self._named, self._page.asked)
            self._page.asked = 0
        return None


class ThroughStore(Coordination):
    """Coordination of ranks of several launchers, or of none, through the key-value store.

    `store`: a client that no other thread uses. `ahead`: steps that a rank may be ahead of rank 0.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, ahead: int = 0) -> None:
        super().__init__()
        self._rank, self._size, self._next = rank, size, ahead + 1
        self._turn = 0
        # Number of the agreement that has a request, once the watchdog's thread has found the request.
        self._ready: int | None = None
        self._store = store

    @property
    def stop_is_asked(self) -> bool:
        """Whether any rank has requested to end the run."""
        turn = self._ready
        return turn is not None and self._store.check([f"{turn}/stop"])

    def at_point(self, steps: int) -> Request | None:
        """Return the request to carry out now, after `steps` updates, or `None`, the same on all ranks."""
        turn = self._ready
        if turn is None:
            return None
        at = f"{turn}/at"
        if not self._store.check([at]):
            everybody = [f"{turn}/ready/{rank}" for rank in range(self._size)]
            if self._rank == 0 and self._store.check(everybody):
                self._store.set(at, str(steps + self._next))
                self._store.get(at)  # wait for the store's value before rank 0 begins the step
            return None
        if steps < int(self._store.get(at)):
            return None
        asked = (
            request for request in ("stop", "save") if self._store.check([f"{turn}/{request}"])
        )
        agreed: Request = next(asked, "snapshot")  # type: ignore[arg-type]
        if _stronger(self._request, agreed) == agreed:
            self._request = None  # a stronger request came too late, and is for the next agreement
        self._turn, self._ready = turn + 1, None
        return agreed

    def poll(self) -> None:
        """Write this rank's request to the store and read other ranks'; the watchdog's thread calls it."""
        # Read `_ready` first: while it is None, the main thread does not change `_turn`.
        if self._ready is not None:
            return
        turn, request = self._turn, self._request
        if request is not None:
            self._store.set(f"{turn}/{request}", "1")
            self._store.set(f"{turn}/asked", "1")
        if self._store.check([f"{turn}/asked"]):
            # Set `_ready` first: the store's key states that the main thread reads at every point.
            self._ready = turn
            self._store.set(f"{turn}/ready/{self._rank}", "1")
