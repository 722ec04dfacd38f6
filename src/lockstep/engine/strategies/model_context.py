"""`ModelContext`: the device, groups and settings that a strategy gets with a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.exchange.base import Forest

#: Returns a context manager that marks a wait for other ranks, for the watchdog and the launcher.
Waiting = Callable[[], AbstractContextManager[None]]


class Heartbeat(Protocol):
    """Reports to the launcher in which collective call this rank waits."""

    def collective(self, kind: str) -> AbstractContextManager[None]:
        """Return a context manager for a collective call in the loop's body."""


class Watchdog(Protocol):
    """Names ranks that are missing in a pass through a model."""

    def passing(self, row: range) -> AbstractContextManager[None]:
        """Return a context manager for a pass in which the ranks of `row` wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Device, groups, replicas and settings of one model of the run.

    Attributes:
        number: which of the run's models it is, from 0.
        device: what this rank computes on.
        block: the replicas of this rank.
        replicas: number of replicas in all.
        forest: the tree nodes of the ranks in `group`.
        group: the ranks that hold the same part of the model; `None` for a single rank.
        mesh: torch's DeviceMesh of all ranks, with dimensions `data` and `model`; `None` where each rank
            holds a whole model.
        store: shared by all ranks.
        exchange: name of the exchange.
        sync_every: steps between two averages of `local-sgd` and `diloco`; `None` for the default.
        exact: whether what makes the result depend on the layout is refused.
        say: prints a line on the main rank; not where progress is off.
        warn: prints a line there in any case.
        staleness: how many updates gradients lack; `None` where that is not asked for.
        servers: the run's parameter servers (`lockstep.engine.parameter_server.servers.Servers`).
        exchanging: measures the time in which a backward pass waits for sums of gradients.
        heartbeat: where this rank reports in which collective call it waits.
        watchdog: names missing ranks; `None` on a single rank.
        ranks: of the run.
        ranks_of_row: those that hold this rank's model together.
    """

    number: int
    device: torch.device
    block: range
    replicas: int
    forest: Forest
    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    store: dist.Store
    exchange: str
    sync_every: int | None
    exact: bool
    say: Callable[[str], None]
    warn: Callable[[str], None]
    staleness: int | None = None
    servers: object = None
    exchanging: AbstractContextManager[object] = field(default_factory=nullcontext)
    heartbeat: Heartbeat | None = None
    watchdog: Watchdog | None = None
    ranks: range = range(1)
    ranks_of_row: range = range(1)

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context manager for waits of an optimizer's step."""
        return self._collective("optimizer.step")

    def sharing(self) -> AbstractContextManager[None]:
        """Return a context manager for waits for other ranks' buffers."""
        return self._collective("the exchange of buffers")

    def gathering(self) -> AbstractContextManager[None]:
        """Return a context manager for waits for other ranks' parts of parameters, outside of backward."""
        return self._collective("the gathering of parameters")

    def gathering_in_backward(self) -> AbstractContextManager[None]:
        """Return the same inside of `run.backward`, which is itself a collective call."""
        return nullcontext() if self.watchdog is None else self.watchdog.passing(self.ranks)

    def passing(self) -> AbstractContextManager[None]:
        """Return a context manager for waits inside of a pass through a model that ranks hold together."""
        return nullcontext() if self.watchdog is None else self.watchdog.passing(self.ranks_of_row)

    def _collective(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.heartbeat is None else self.heartbeat.collective(kind)
