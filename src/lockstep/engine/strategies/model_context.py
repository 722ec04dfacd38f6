"""`ModelContext`: the device, groups and settings that a strategy gets with a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.exchange.base import Forest

#: Makes what is entered while a rank waits for others, so that it is known where it stands.
Waiting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Where a model of the run is to live.

    Attributes:
        number: which of the run's models it is, from 0.
        device: what this rank computes on.
        block: the replicas of this rank.
        replicas: number of replicas in all.
        forest: the tree nodes of the ranks in `group`.
        group: the ranks that hold the same part of the model; `None` for a single rank.
        mesh: torch's view of all ranks, with dimensions `data` and `model`; `None` where each rank
            holds a whole model.
        store: where ranks leave notes for each other.
        exchange: name of the exchange.
        sync_every: steps between two averages of `local-sgd` and `diloco`; `None` for the default.
        exact: whether what makes the result depend on the layout is refused.
        say: tells the user how the model is held, on the main rank; not where progress is off.
        warn: tells the user there what must not be missed.
        staleness: how many updates gradients lack; `None` where that is not asked for.
        servers: the run's parameter servers (`lockstep.engine.parameter_server.servers.Servers`).
        exchanging: entered while a backward pass waits for gradients to be summed, where the host does.
        stepping: for an optimizer's step that waits for other ranks.
        sharing: for ranks that wait for each other's buffers.
        gathering: for ranks that wait for each other's parts of parameters, in a call by itself.
        gathering_in_backward: the same inside of `run.backward`, which is a call on a rank's last
            microbatch only.
        passing: for ranks that wait for each other inside of a pass through the model.
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
    stepping: Waiting = nullcontext
    sharing: Waiting = nullcontext
    gathering: Waiting = nullcontext
    gathering_in_backward: Waiting = nullcontext
    passing: Waiting = nullcontext
