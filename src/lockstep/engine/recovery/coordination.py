"""Agreement of all ranks on the step after which they save the state, take a snapshot or end the run.

A point is the moment after a batch, an epoch or `run.save`, when the state is complete. A rank makes a
request (`snapshot`, `save` or `stop`). Rank 0 then chooses the number of a step that no rank can have
finished. This is the next step; with staleness K, when ranks may be K steps ahead of rank 0, it is K steps
later. At the first point after the chosen step all ranks carry out the request.

Ranks of one launcher share its status page, a piece of memory. They write requests to the page, rank 0
writes the chosen step, and every rank reads the page at every point.

Ranks of several launchers, or of none, use the key-value store. Reading the store at every point is too
slow, so the watchdog's thread of each rank polls the store. When this thread finds a request, it writes to
the store that its rank is ready, and the main thread reads the store at every point from then on. When all
ranks are ready, rank 0 chooses the step.
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
    """Abstract class: one rank's part in the agreement on when all ranks save the state or end the run.

    A rank makes a request by `ask`. At the agreed step, `at_point` returns the request on all ranks.
    """

    def __init__(self) -> None:
        self._request: Request | None = None

    def ask(self, request: Request) -> None:
        """Request that all ranks save the state or stop after one of the next steps.

        A signal handler may call this method. Of several requests the strongest counts: `stop`, `save`,
        `snapshot`.
        """
        self._request = _stronger(self._request, request)

    @property
    @abc.abstractmethod
    def stop_is_asked(self) -> bool:
        """Whether this rank has made or received a request to end the run that is not carried out yet."""

    @abc.abstractmethod
    def at_point(self, steps: int) -> Request | None:
        """Return the request (save, snapshot or stop) to carry out now, after `steps` updates, or `None`.

        Called after every batch, epoch and `run.save`; all ranks get the same request after the same step.
        """


def _stronger(one: Request | None, other: Request) -> Request:
    return other if _REQUESTS.index(one) < _REQUESTS.index(other) else one or other


class Alone(Coordination):
    """`Coordination` in a world of one rank, whose own requests are carried out at its next point."""

    @property
    def stop_is_asked(self) -> bool:
        """Whether `ask("stop")` was called and `at_point` has not returned this request yet."""
        return self._request == "stop"

    def at_point(self, steps: int) -> Request | None:
        """Return this rank's request, and clear it; `None` if there is none. `steps` is not used."""
        request, self._request = self._request, None
        return request


class OnStatusPage(Coordination):
    """`Coordination` of ranks that one launcher started, through its status page in shared memory.

    `leads`: whether this is rank 0, which chooses the step. `ahead`: number of steps by which another rank
    may be ahead of rank 0.
    """

    def __init__(self, page: StatusPage, *, leads: bool, ahead: int = 0) -> None:
        super().__init__()
        self._page, self._leads, self._next = page, leads, ahead + 1
        self._done = self._named = 0

    @property
    def stop_is_asked(self) -> bool:
        """Return whether any rank has asked that the run ends.

        First write this rank's own pending request, if any, to the status page, where other ranks read it.
        """
        self._write_request()
        at, what = self._page.agreed
        agreed = what if at > self._done else 0
        return _REQUESTS.index("stop") in (self._page.asked, agreed)

    def _write_request(self) -> None:
        if self._request is not None:
            # Written at every point until a step is agreed on, since rank 0 may clear it with another one.
            self._page.asked = max(self._page.asked, _REQUESTS.index(self._request))

    def at_point(self, steps: int) -> Request | None:
        """Return the request that all ranks carry out now, after `steps` optimizer steps, or `None`.

        A request is `snapshot`, `save` or `stop`.
        """
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
    """`Coordination` of ranks of several launchers, or of none, through the key-value store.

    `store`: a client of the store that only this object uses. `ahead`: number of steps by which another
    rank may be ahead of rank 0.
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
        """Whether `poll` has found a request, of any rank, to end the run."""
        turn = self._ready
        return turn is not None and self._store.check([f"{turn}/stop"])

    def at_point(self, steps: int) -> Request | None:
        """Return the request that all ranks carry out now, after `steps` optimizer steps, or `None`.

        A request is `snapshot`, `save` or `stop`.
        """
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
        """Write this rank's request to the store, and look for requests of all ranks there.

        The watchdog's thread calls this method repeatedly.
        """
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
