"""How the ranks of a run stand: which of them hold one model together, and which hold the same part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.errors import UsageError
from lockstep.exchange.base import Forest
from lockstep.exchange.choose import choose_name
from lockstep.layout.mesh import SPREAD, Mesh, choose
from lockstep.layout.replicas import block
from lockstep.training.settings import Settings
from lockstep.world import World
from lockstep.world.connect import keep

#: Strategies whose models live in a process group even where it has one rank.
_ALWAYS_IN_A_GROUP = ("ps", "fsdp", *SPREAD)
#: What the dimensions of the mesh are called.
NAMES = ("data", "model")


@dataclass(frozen=True, slots=True)
class Formation:
    """Where this rank stands among the others.

    Attributes:
        mesh: the ranks as a rectangle.
        row: which of the models this rank holds a part of.
        column: which part.
        replicas: number of replicas in all.
        block: those of this rank's model.
        forest: the tree nodes of the ranks that hold the same part.
    """

    mesh: Mesh
    row: int
    column: int
    replicas: int
    block: range
    forest: Forest

    @staticmethod
    def of(mesh: Mesh, rank: int, replicas: int) -> Formation:
        """Return the formation of `replicas` replicas on `mesh`, as `rank` sees it.

        Raises:
            UsageError: if there are fewer replicas than models.
        """
        row, column = mesh.place(rank)
        own = block(replicas, mesh.data, row)
        return Formation(mesh, row, column, replicas, own, Forest.of(replicas, mesh.data, row))


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of this rank.

    Attributes:
        everyone: all ranks; `None` for a single one that needs no group.
        data: those that hold the same part of a model; `None` as before.
        mesh: torch's own view of them, where models are spread or sharded.
    """

    everyone: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    mesh: DeviceMesh | None

    @staticmethod
    def of(
        everyone: dist.ProcessGroup | None, mesh: Mesh, strategy: str, device: torch.device
    ) -> Groups:
        """Make the groups; all ranks do so together."""
        if everyone is None or strategy not in _ALWAYS_IN_A_GROUP:
            return Groups(everyone, everyone, None)
        made = make_mesh(mesh, device)
        data = everyone if mesh.model == 1 else made.get_group("data")
        return Groups(everyone, data, made)


def make_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return torch's mesh of all ranks, with the dimensions `data` and `model`; all ranks make it."""
    made = init_device_mesh(device.type, (mesh.data, mesh.model), mesh_dim_names=NAMES)
    for name in NAMES:
        keep(made.get_group(name))
    return made


def needs_group(strategy: str) -> bool:
    """Whether even a single rank has a process group."""
    return strategy in _ALWAYS_IN_A_GROUP


def choose_mesh(settings: Settings, world: World) -> Mesh:
    """Return the mesh of a run.

    Raises:
        UsageError: if strategy, mesh and number of ranks cannot go together.
    """
    for strategy in ("single", "dp"):
        if settings.strategy == strategy and world.size > 1:
            raise UsageError(
                f"strategy={strategy} with {world.size} ranks; expected one rank",
                hint="strategy='ddp', or leave it to 'auto'",
            )
    return choose(settings.mesh, settings.strategy, world.size)


def choose_exchange(settings: Settings, formation: Formation, world: World, device: str) -> str:
    """Return the name of the exchange to use where there are several ranks.

    Raises:
        UsageError: for one that cannot work here.
        ExactnessError: for one that breaks the promise.
    """
    return choose_name(
        settings.exchange,
        formation.forest,
        one_host=world.local_size == world.size,
        device=device,
        exact=settings.exact,
    )
