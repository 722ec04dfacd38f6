"""From a world to its process group: the store where ranks meet is made here, never guessed."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.world.model import World

#: Process groups stay until the process ends. Whoever drops the last reference to one joins Gloo's
#: threads with the interpreter's lock in hand; one of them may be waiting for that lock to drop a tensor
#: of the last collective, and then neither ever goes on (seen with torch 2.13).
KEPT: list[dist.ProcessGroup | None] = []


#: Runs of this process so far. All ranks make the same runs in the same order, so that the number keeps
#: the notes of one run from being taken for another's.
_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Connection:
    """How this rank reaches the others.

    Attributes:
        store: a key-value store that all ranks reach; fresh in every generation.
        group: the process group; `None` for a single rank.
        owned: whether the group was made here, and is to be destroyed at the end.
        number: how many runs this process has made before.
    """

    store: dist.Store
    group: dist.ProcessGroup | None
    owned: bool
    number: int


def connect(world: World, device: torch.device, timeout: timedelta) -> Connection:
    """Meet the other ranks.

    A process group that the script has already made is taken as it is.

    Raises:
        WorldError: if the store cannot be reached or hosted.
    """
    number = next(_runs)
    prefix = f"lockstep/{world.generation}/{number}"
    if dist.is_initialized():
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        return Connection(store, dist.group.WORLD, owned=False, number=number)
    if world.size == 1:
        return Connection(dist.HashStore(), None, owned=False, number=number)
    store = dist.PrefixStore(prefix, _reach_store(world, timeout))
    if _is_loopback(world):
        # Gloo would otherwise bind to whatever the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    KEPT.append(dist.group.WORLD)
    run_store = dist.PrefixStore("run", store)
    return Connection(run_store, dist.group.WORLD, owned=True, number=number)


def _reach_store(world: World, timeout: timedelta) -> dist.Store:
    assert world.address is not None
    assert world.port is not None, "World checks it"
    hosts = world.rank == 0 and not world.agent_store
    listener = _listen(world) if hosts and _is_loopback(world) else None
    try:
        return dist.TCPStore(
            world.address,
            world.port,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except dist.DistNetworkError as error:
        raise _unreachable(world, hosts=hosts, cause=str(error)) from error


def _listen(world: World) -> socket.socket:
    """Listen on the loopback interface only; the store would listen on all of them."""
    assert world.address is not None
    try:
        return socket.create_server((world.address, world.port or 0), backlog=2048)
    except OSError as error:
        raise _unreachable(world, hosts=True, cause=str(error)) from error


def _unreachable(world: World, *, hosts: bool, cause: str) -> WorldError:
    place = f"{world.address}:{world.port}"
    if hosts and ("EADDRINUSE" in cause or os.strerror(errno.EADDRINUSE) in cause):
        return WorldError(
            f"port {world.port} on {world.address} is taken",
            hint="start with `lockstep run`, which chooses a free one, or set MASTER_PORT",
        )
    return WorldError(
        f"rank {world.rank} cannot reach the store at {place}: {cause.splitlines()[0]}",
        hint="check MASTER_ADDR and MASTER_PORT, and that rank 0 is running",
    )


def _is_loopback(world: World) -> bool:
    if world.address == "localhost":
        return True
    try:
        return ipaddress.ip_address(world.address or "").is_loopback
    except ValueError:
        return False
