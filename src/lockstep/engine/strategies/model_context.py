"""`ModelContext`: the device, process groups and settings with which a strategy wraps a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.exchange.base import Forest

#: Returns a context manager for a wait for other ranks, which the watchdog and the launcher report.
Waiting = Callable[[], AbstractContextManager[None]]


class Heartbeat(Protocol):
    """Writes to the launcher's status page in which collective call this rank waits."""

    def collective(self, kind: str) -> AbstractContextManager[None]:
        """Return a context manager for a collective call of this kind, such as "optimizer.step"."""


class Watchdog(Protocol):
    """Ends the run with the names of missing ranks if a forward or backward pass waits too long."""

    def passing(self, row: range) -> AbstractContextManager[None]:
        """Return a context manager for a forward or backward pass in which the ranks `row` communicate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Device, process groups, replicas and settings of one model of the run.

    Attributes:
        number: index of the model among the models of the run, from 0.
        block: the replicas that this rank hosts.
        replicas: number of replicas on all ranks.
        forest: the tree nodes (sums over replicas) of each rank in `group`, and the order of their sums.
        group: the ranks that hold the same part of the model; `None` for a single rank.
        mesh: torch's DeviceMesh of all ranks, with dimensions `data` and `model`; `None` where each rank
            holds a whole model.
        exchange: name of the exchange.
        sync_every: steps between two averages of `local-sgd` and `diloco`; `None` for the default.
        exact: whether a setting that makes the result depend on the layout raises an error.
        say: prints a line on the main rank, unless progress is off.
        warn: prints a line on the main rank.
        staleness: number of latest updates that parameters lack in passes with gradients; `None`: off.
        servers: the run's parameter servers (`lockstep.engine.parameter_server.servers.Servers`).
        exchanging: context manager that measures how long a backward pass waits for sums of gradients.
        watchdog: `None` on a single rank.
        ranks: all ranks of the run.
        ranks_of_row: the ranks that hold this rank's model together.
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
        """Return a context manager in which an optimizer's step may wait for other ranks."""
        return self._collective("optimizer.step")

    def sharing(self) -> AbstractContextManager[None]:
        """Return a context manager in which a rank may wait for other ranks' buffers."""
        return self._collective("the exchange of buffers")

    def gathering(self) -> AbstractContextManager[None]:
        """Return a context manager in which a rank gathers parameters, except in a backward pass."""
        return self._collective("the gathering of parameters")

    def gathering_in_backward(self) -> AbstractContextManager[None]:
        """Return a context manager in which a rank gathers parameters during `run.backward`."""
        return nullcontext() if self.watchdog is None else self.watchdog.passing(self.ranks)

    def passing(self) -> AbstractContextManager[None]:
        """Return a context manager for a pass in which the ranks that hold one model communicate."""
        return nullcontext() if self.watchdog is None else self.watchdog.passing(self.ranks_of_row)

    def _collective(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.heartbeat is None else self.heartbeat.collective(kind)
