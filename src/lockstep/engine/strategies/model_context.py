"""`ModelContext`: the device, process groups and settings with which a strategy wraps a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest
from lockstep.engine.exchange.choose import make

#: Returns a context manager for a wait for other ranks, which the watchdog and the launcher report.
Waiting = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Device, process groups, replicas and settings of one model of the run.

    Attributes:
        number: index of the model among the models of the run, from 0.
        block: the replicas (data-parallel workers of the run) that this rank computes.
        replicas: number of replicas on all ranks.
        forest: order in which gradients of replicas are added, within each rank and over `group`.
        group: the ranks that hold the same part of the model; `None` for a single rank.
        mesh: torch's DeviceMesh of all ranks, with dimensions `data` and `model`; `None` where each rank
            holds a whole model.
        exchange: name of the way in which gradients are summed over ranks, such as "tree".
        sync_every: optimizer steps between two averages of parameters (strategies `local-sgd`, `diloco`);
            `None` for the default.
        exact: whether settings that make the result depend on the number of ranks raise an error.
        say: prints a line on the main rank, unless progress is off.
        warn: prints a line on the main rank.
        staleness: number of latest updates that parameters lack when gradients are computed; `None`: off.
        servers: the run's parameter servers (`lockstep.engine.parameter_server.servers.Servers`).
        exchanging: context manager that measures how long a backward pass waits for sums of gradients.
        collective: returns a context manager for a collective call of the given name, such as
            "optimizer.step", which the launcher's status page shows while this rank waits in it.
        passing: returns a context manager for a forward or backward pass, which ends the run if the pass
            waits too long for the given ranks, and names them. On a single rank it has no effect.
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
    collective: Callable[[str], AbstractContextManager[object]] = nullcontext
    passing: Callable[[range], AbstractContextManager[object]] = nullcontext
    ranks_of_row: range = range(1)

    def make_exchange(
        self, parameters: Sequence[torch.Tensor], key: str, settings: Mapping[str, Any]
    ) -> Exchange:
        """Return a new exchange that sums the gradients of `parameters` over the ranks of `group`.

        `key`: unique name of the exchange within the run. `settings`: keyword arguments of `run.model`.
        """
        assert self.group is not None
        return make(
            ExchangeContext(
                name=self.exchange,
                forest=self.forest,
                parameters=parameters,
                group=self.group,
                store=self.store,
                key=key,
                settings=settings,
            )
        )

    def sharing(self) -> AbstractContextManager[object]:
        """Return a context manager that reports to the launcher that this rank synchronizes buffers.

        The strategies `local-sgd` and `diloco` use it for averages of parameters, too.
        """
        return self.collective("the exchange of buffers")
