"""`ParallelDims`, `Groups`: this rank's position in the mesh of ranks, and its process groups.

In the mesh, the ranks of a row hold one model together, and those of a column hold the same part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.choose import check_exchange
from lockstep.engine.layout.classes import updates_in_servers
from lockstep.engine.layout.mesh import Mesh, choose
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.server_count import check as check_servers
from lockstep.errors import ExactnessError, UsageError
from lockstep.registry import STRATEGIES
from lockstep.settings import Settings
from lockstep.world import World
from lockstep.world.groups import keep

#: Names of the mesh's dimensions.
NAMES = ("data", "model")


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Position of this rank in the mesh of ranks, and the replicas that it computes."""

    mesh: Mesh
    row: int  # number of the model of which this rank has a part
    column: int  # number of this part
    replicas: int  # number of replicas of all ranks
    block: range  # replicas that this rank's row computes
    forest: Forest  # nodes of the reduction tree that the ranks in this column sum

    @staticmethod
    def of(mesh: Mesh, rank: int, replicas: int) -> ParallelDims:
        """Return the position of `rank` in `mesh`; raise `UsageError` if a rank would have no replica."""
        row, column = mesh.place(rank)
        own = block(replicas, mesh.data, row)
        return ParallelDims(mesh, row, column, replicas, own, Forest.of(replicas, mesh.data, row))

    @property
    def ranks_of_row(self) -> range:
        """The ranks that hold one model together with this rank (a row of the mesh), this rank included."""
        return range(self.row * self.mesh.model, (self.row + 1) * self.mesh.model)


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of this rank: of all ranks, and of the ranks with the same part of a model."""

    everyone: dist.ProcessGroup | None  # all ranks; `None` for a rank without a group
    data: dist.ProcessGroup | None  # the ranks in this rank's column
    mesh: DeviceMesh | None  # torch's DeviceMesh; `None` if each rank has a whole model

    @staticmethod
    def of(
        everyone: dist.ProcessGroup | None, mesh: Mesh, strategy: str, device: torch.device
    ) -> Groups:
        """Return the process groups of this rank in `mesh`; a collective call.

        `everyone`: the group of all ranks, `None` on a single rank. Groups of the ranks in one row or
        column are made, with the backend of `device`, only for a strategy that uses the mesh.
        """
        if everyone is None or not STRATEGIES.find(strategy).meshed:
            return Groups(everyone, everyone, None)
        settings: dict[str, Any] = {}
        if everyone is not dist.group.WORLD:  # which lacks a backend: see connect.py
            settings = {"backend_override": dict.fromkeys(NAMES, dist.get_backend_config(everyone))}
        shape = (mesh.data, mesh.model)
        made = init_device_mesh(device.type, shape, mesh_dim_names=NAMES, **settings)
        for name in NAMES:
            keep(made.get_group(name))
        data = everyone if mesh.model == 1 else made.get_group("data")
        return Groups(everyone, data, made)


def choose_mesh(settings: Settings, world: World) -> Mesh:
    """Check the settings for strategy, exchange and servers; return the mesh that arranges the run's ranks.

    Raises:
        UsageError: if strategy, mesh, number of ranks and of servers do not fit together, or a setting
            would have no effect.
        ExactnessError: if `exact` is set and the strategy is approximate.
    """
    strategy = STRATEGIES.find(settings.strategy)
    if strategy.one_rank and world.size > 1:
        raise UsageError(
            f"strategy={strategy.name} with {world.size} ranks; expected one rank",
            hint="strategy='ddp', or leave it to 'auto'",
        )
    is_alone = world.size == 1 and strategy.fallback
    if strategy.exactness == "approximate" and settings.exact and not is_alone:
        raise ExactnessError(
            f"strategy={strategy.name} trains by other mathematics than one process does; "
            "expected a strategy that sums gradients in every step",
            hint="strategy='auto', or say exact=False to the run (lockstep run --no-exact)",
        )
    _check_servers(settings, world)
    check_exchange(strategy, settings.exchange)
    _check_averages(settings)
    return choose(settings.mesh, settings.strategy, world.size)


def _check_servers(settings: Settings, world: World) -> None:
    """Raise a `UsageError` if `servers` or `staleness` contradicts strategy or precision."""
    strategy, late = settings.strategy, settings.staleness
    if STRATEGIES.find(strategy).has_servers or world.environment == "lockstep":
        check_servers(strategy, settings.servers)
    entry = STRATEGIES.find(strategy)
    if late and (entry.meshed or entry.averages):
        raise UsageError(
            f"staleness is {late} with strategy={strategy}, which keeps no older parameters; "
            "expected strategy ps, ddp, dp or single",
            hint="--servers S --strategy ps, or leave out the staleness",
        )
    if updates_in_servers(strategy, late) and settings.precision == "fp16":
        raise UsageError(
            f"precision=fp16 with staleness={late}: only the servers have the whole gradient, whose "
            "overflows decide on the loss scale",
            hint="precision='bf16', which needs no loss scale, or leave out the staleness",
        )


def _check_averages(settings: Settings) -> None:
    """Raise `UsageError` if `sync_every` is set for a strategy that sums gradients in every step."""
    if settings.sync_every is not None and not STRATEGIES.find(settings.strategy).averages:
        averaging = STRATEGIES.where(lambda entry: entry.averages)
        raise UsageError(
            f"sync_every is {settings.sync_every} with strategy={settings.strategy}, whose ranks "
            f"synchronize in every step; expected strategy {' or '.join(averaging)}",
            hint=f"--strategy {averaging[0]}, or leave out --sync-every",
        )
