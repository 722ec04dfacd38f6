"""`connect`: make the process group of a run after its rendezvous, or use the script's own group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.errors import DeviceError
from lockstep.world import accelerator
from lockstep.world.devices import device_identity
from lockstep.world.groups import keep
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from lockstep.world.rendezvous.store import TIMEOUT

_HINT = "start fewer ranks on this node, or check {} of each"


@dataclass(frozen=True, slots=True)
class Connection:
    """Store and process group of a run.

    Attributes:
        group: process group of all ranks; `None` for a single rank.
        owned: whether Lockstep made the group, and destroys it at the end of the run.
    """

    store: dist.Store
    group: dist.ProcessGroup | None
    owned: bool


def connect(
    rendezvous: RankRendezvous, device: torch.device, *, always: bool = False
) -> Connection:
    """Return the store and the process group of all ranks.

    If the script has made a process group with backends for the CPU and the device, that group is used;
    otherwise a new one is made. With `always`, a single rank gets a process group, too.

    Raises:
        DeviceError: if two ranks would share a GPU.
    """
    world, store = rendezvous.world, rendezvous.store
    notes = dist.PrefixStore("run", store)
    if world.size == 1 and not always and not dist.is_initialized():
        return Connection(notes, None, owned=False)
    _check_devices(dist.PrefixStore("devices", store), world.rank, device)
    rendezvous.ready()
    if dist.is_initialized():
        return Connection(notes, _adopt(device), owned=False)
    backends = _backends(device)
    try:
        dist.init_process_group(
            backends,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=TIMEOUT,
        )
        if accelerator.holds(device):  # its backend connects the ranks at the first collective
            dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        if "duplicate" not in str(error).lower():
            raise
        raise DeviceError(
            f"{accelerator.facts().backend} refuses {device}: {str(error).partition(chr(10))[0]}; "
            "expected a device of its own for each rank",
            hint=_HINT.format(accelerator.facts().visible),
        ) from error
    keep(dist.group.WORLD)
    return Connection(notes, dist.group.WORLD, owned=True)


def _backends(device: torch.device) -> str:
    """Return the `backend` of a process group for CPU and `device`, such as `cpu:gloo,cuda:nccl`."""
    if not accelerator.holds(device):
        return "gloo"
    name = accelerator.facts().backend
    if not (name and dist.is_backend_available(name)):
        backend = f"its backend {name}" if name else "no collective backend for it"
        raise DeviceError(
            f"{device}: this PyTorch has {backend}{' not' if name else ''}; "
            "expected one, since several ranks train",
            hint="one rank (-n 1) needs none; --devices cpu trains over Gloo",
        )
    return f"cpu:gloo,{device.type}:{name}"


def _adopt(device: torch.device) -> dist.ProcessGroup:
    """Return the script's process group, or a new one if it lacks a backend for the CPU or for `device`.

    Ranks compare steps and sum metrics in CPU tensors, for which a group with NCCL alone has no backend.
    """
    group = dist.group.WORLD
    assert group is not None, "the script has made it"
    served = {pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")}
    if {"cpu", device.type} <= served:
        return group
    made: dist.ProcessGroup = dist.new_group(backend=_backends(device), timeout=TIMEOUT)
    keep(made)
    return made


def _check_devices(store: dist.Store, rank: int, device: torch.device) -> None:
    """Raise a `DeviceError` if another rank uses the GPU of this rank, since NCCL would hang.

    `store` is a store for this check alone, in which each rank claims its GPU.
    """
    own = device_identity(device)
    if own is None:
        return
    claims = dist.PrefixStore(own, store)  # GPU ids are unique over all nodes
    if claims.add("claims", 1) == 1:
        claims.set("first", str(rank))
        return
    raise DeviceError(
        f"ranks {claims.get('first').decode()} and {rank} are both on GPU {own}; "
        "expected a GPU of its own for each rank",
        hint=_HINT.format(accelerator.facts().visible),
    )
