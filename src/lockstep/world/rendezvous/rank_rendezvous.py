"""`join_ranks`: connect all ranks to a common store, and check the ranks and their network.

The `World` from the environment variables may lack local and node ranks. The membership check adds them,
and the connectivity check then chooses the network interface.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import (
    LockstepError,
    PeerError,
    UnreachableError,
    UsageError,
    WorldError,
    shortened,
)
from lockstep.world import mpi, network
from lockstep.world.environments.torchrun import MARK
from lockstep.world.model import World
from lockstep.world.rendezvous import membership_check, port_discovery
from lockstep.world.rendezvous.connectivity_check import check_connectivity
from lockstep.world.rendezvous.store import (
    TIMEOUT,
    connect_store,
    host_store,
    launch_store,
    open_file,
)
from lockstep.world.waiting import await_any

_JOIN_VARIABLE = "LOCKSTEP_JOIN_TIMEOUT"
_JOIN_SECONDS = 300.0
#: Seconds that ranks wait for the rank of their node that runs the connectivity check.
_CONNECTIVITY_SECONDS = 120.0

#: Counter of the runs of this process. All ranks make the same runs in the same order, so that the
#: number is a key prefix for each run.
_runs = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRendezvous:
    """A completed rendezvous of all ranks.

    Attributes:
        world: rank and world size, with local and node ranks.
        store: store of all ranks, with a key prefix for this run and restart.
        number: number of earlier runs of this process.
        ours: whether Lockstep made the store, so that `leave` removes it.
    """

    world: World
    store: dist.Store
    number: int
    ours: bool

    def fail(self, error: BaseException) -> None:
        """Write this rank's error to the store, from which other ranks read it during their waits."""
        if self.world.size == 1:
            return
        what = shortened(str(error).partition("\n")[0], 1000)
        # The store may be gone with its host; then no rank is left to read it.
        with contextlib.suppress(RuntimeError):
            if self.store.add("failures", 1) == 1:
                text = f"rank {self.world.rank} failed: {type(error).__name__}: {what}"
                self.store.set("failed", text)

    def failure_of_others(self, seconds: float) -> str | None:
        """Return the error that another rank has written to the store; `None` if there is none.

        If there is none yet, wait up to `seconds` for one.
        """
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            if await_any(self.store, [["failed"]], seconds) is not None:
                return self.store.get("failed").decode()
        return None

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Context manager: write an exception of its body to the store for the other ranks."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def ready(self) -> None:
        """Wait until all ranks have called this method, before the first collective.

        Raises:
            PeerError: if another rank has failed.
        """
        self.conclude("ready", "1", lambda _: "1", "begin")

    def conclude(self, key: str, own: str, of: Callable[[list[str]], str], what: str) -> str:
        """Gather the texts `own` of all ranks on rank 0; return the result of `of` on all ranks.

        All ranks call this method; rank 0 calls `of` with the texts in rank order. `key` is a name for this
        call in the store, different for each call; `what` is the phase of the run, for the error message. N
        ranks read 2 N keys.

        Raises:
            PeerError: if another rank has failed, or after the timeout of collectives.
        """
        keys = [f"{key}/{rank}" for rank in range(self.world.size)]
        self.store.set(keys[self.world.rank], own)

        def answer() -> str:
            self.wait(keys, what)
            return of([self.store.get(name).decode() for name in keys])

        return self.broadcast(key, answer, what)

    def broadcast(self, key: str, answer: Callable[[], str], what: str) -> str:
        """Return on all ranks the result of `answer`, which only rank 0 calls.

        All ranks call this method. `key` is a key of the store, different for each call; `what` is the
        phase of the run, for the error message.

        Raises:
            PeerError: if another rank has failed, or after the timeout of collectives.
        """
        if self.world.is_main:
            self.store.set(key, answer())
        self.wait([key], what)
        return self.store.get(key).decode()

    def wait(self, keys: Sequence[str], what: str) -> None:
        """Wait until the store has all `keys`.

        `what` is the phase of the run, for the error message.

        Raises:
            PeerError: if another rank has failed, or after the timeout of collectives.
        """
        try:
            found = await_any(self.store, [["failed"], keys], TIMEOUT.total_seconds())
            failed = self.store.get("failed").decode() if found == 0 else None
        except RuntimeError as error:
            raise PeerError(
                f"the store is gone, and with it the rank that hosts it: {error}"
            ) from error
        if found != 1:
            raise PeerError(failed or f"not all ranks came to {what} within {TIMEOUT}")


def join_ranks(world: World, store: dist.Store | None = None) -> RankRendezvous:
    """Connect to the other ranks by a common store, check ranks and network; return the rendezvous.

    The common store is `store` if the user gave one, or else that of a process group that the script has
    made, or else the launcher's file, or a new store at the rendezvous address of `world`. Under `lockstep
    run` the launcher has checked the ranks already.

    Raises:
        UnreachableError: if another rank or node cannot be reached.
        WorldError: if ranks are missing, or contradict each other.
        UsageError: if an environment variable is invalid.
    """
    number = next(_runs)
    if store is None and dist.is_initialized():
        world = _as_in_group(world)
    if world.size == 1:
        return RankRendezvous(world=world, store=dist.HashStore(), number=number, ours=True)
    given = store
    if given is None and dist.is_initialized():
        given = dist.distributed_c10d._get_default_store()
    wait = join_timeout()
    with contextlib.ExitStack() as announced:  # closes the announcer of the store's port
        base = _reach_store(world, number, wait, announced) if given is None else given
        fresh = dist.PrefixStore(f"lockstep/{world.generation}/{number}", base)
        # `lockstep run` has checked its ranks; with a shared file, check again, as the file may be old.
        unchecked = world.environment != "lockstep" or world.file is not None
        if unchecked:
            world = _complete(world, dist.PrefixStore("join", fresh), number, wait)
    if not unchecked and network.is_loopback(world.address):
        _use_interface("lo")
    return RankRendezvous(world=world, store=fresh, number=number, ours=given is None)


def join_timeout() -> timedelta:
    """Return the time that ranks have to join, from `LOCKSTEP_JOIN_TIMEOUT` in seconds.

    Raises:
        UsageError: if the variable is not a positive number.
    """
    text = os.environ.get(_JOIN_VARIABLE)
    if text is None:
        return timedelta(seconds=_JOIN_SECONDS)
    with contextlib.suppress(ValueError, OverflowError):
        if float(text) > 0:
            return timedelta(seconds=float(text))
    raise UsageError(f"{_JOIN_VARIABLE} is {text!r}; expected a positive number of seconds")


def leave(rendezvous: RankRendezvous) -> None:
    """Leave the store at the end of a run; rank 0, which may host the store, waits for all ranks."""
    world, store = rendezvous.world, rendezvous.store
    launchers = world.agent_store or world.launch_file is not None
    if not rendezvous.ours or launchers or world.size == 1:
        return
    store.set(f"left/{world.rank}", "1")
    if world.is_main:
        rendezvous.wait([f"left/{rank}" for rank in range(world.size)], "the end")
        if world.file is not None:
            _file_of(world, rendezvous.number).unlink(missing_ok=True)


def _as_in_group(world: World) -> World:
    """Return `world` if its rank and size are those of the script's process group.

    Otherwise, return a new `World` with the rank and size of that group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (world.rank, world.size):
        return world
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        placed=False,
        address="(the script's process group)",
        key="group",
        environment="group",
        reason="the script has made a process group",
    )


def _complete(world: World, store: dist.Store, number: int, wait: timedelta) -> World:
    own = membership_check.RankInfo.of(world, os.getpid())
    notes = dist.PrefixStore("members", store)
    try:
        world, names = membership_check.check_members(notes, world, own, wait.total_seconds())
    except WorldError:
        if world.file is not None and world.is_main and membership_check.came_once(notes, 0):
            _file_of(world, number).unlink(missing_ok=True)  # no other ranks use it
        raise
    if world.node_count == 1:
        _use_interface("lo")
    else:
        _check_connectivity(world, names, store)
    return world


def _check_connectivity(world: World, names: Sequence[str], store: dist.Store) -> None:
    """Check the network between the nodes, and make Gloo and NCCL use the interface that was found.

    The first rank of each node takes part in the check. All ranks set the interface in variables such as
    `GLOO_SOCKET_IFNAME`. `names` are the host names of the nodes, for messages; `store` is the store
    through which the nodes and ranks exchange results.

    Raises:
        UnreachableError: if nodes cannot connect to each other, or the first rank of the node is
            missing.
    """
    mine = f"interface/{world.node_rank}"
    if world.local_rank == 0:
        labels = [f"node {number} ({name})" for number, name in enumerate(names)]
        try:
            found = check_connectivity(
                dist.PrefixStore("connectivity", store),
                index=world.node_rank,
                labels=labels,
                interface=chosen_interface(),
            )
        except LockstepError as error:
            store.set(mine, f"\n{error}")
            raise
        store.set(mine, found[world.node_rank].name)
    if await_any(store, [[mine]], _CONNECTIVITY_SECONDS) is None:
        raise UnreachableError(
            f"the first rank of node {world.node_rank} has not tried the network"
        )
    interface, _, problem = store.get(mine).decode().partition("\n")
    if problem:
        raise UnreachableError(problem)
    _use_interface(interface)


def chosen_interface() -> str | None:
    """Return the network interface set by `LOCKSTEP_INTERFACE` or `GLOO_SOCKET_IFNAME`, if any."""
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # The variable may have several names; and in a worker, its launcher has set it.
    is_one = gloo and "," not in gloo and MARK not in os.environ
    return os.environ.get("LOCKSTEP_INTERFACE") or (gloo if is_one else None)


def _use_interface(name: str) -> None:
    overrules = "LOCKSTEP_INTERFACE" in os.environ
    for variable in network.INTERFACES:
        if overrules or variable not in os.environ:
            os.environ[variable] = name


def _reach_store(
    world: World, number: int, wait: timedelta, announced: contextlib.ExitStack
) -> dist.Store:
    """Return the key-value store that all ranks of `world` share; rank 0 hosts it, unless it is a file.

    The address comes from a file of the user or of the launcher, from MPI, from the name that the
    scheduler's job has, or is the address and port in `world`. `number`: number of the run in this process.
    `wait`: longest time to wait for rank 0. `announced`: context that ends the announcement of the port.
    """
    if world.file is not None:
        return open_file(_file_of(world, number))
    if world.launch_file is not None:
        return launch_store(world.launch_file)
    if world.by_mpi:
        name, addresses = mpi.agree(world)
        return _by_name(world, name, addresses, wait, announced)
    if world.key is not None and world.port is None:
        assert world.address is not None, "World checks it"
        name = f"{world.key}/{world.generation}/{number}"
        addresses = () if world.is_main else network.addresses_of(world.address)
        return _by_name(world, name, addresses, wait, announced)
    return _at_port(world, wait)


def _file_of(world: World, number: int) -> Path:
    assert world.file is not None
    return Path(world.file if number == 0 else f"{world.file}.{number}")


def _by_name(
    world: World,
    name: str,
    addresses: Sequence[str],
    wait: timedelta,
    announced: contextlib.ExitStack,
) -> dist.Store:
    """Return the store of job `name`: rank 0 hosts it, other ranks find its port by port discovery.

    `addresses` are those of rank 0's host. Other ranks search there for the time `wait` at most. On rank 0,
    the exit stack `announced` gets a callback that ends the answers to port discovery.
    """
    loopback = network.listens_locally(world.address)
    if world.rank == 0:
        store = host_store(0, loopback=loopback)
        announced.enter_context(port_discovery.announce(name, store.port, loopback=loopback))
        return store
    who = f"rank {world.rank}"
    return connect_store(*port_discovery.find(addresses, name, who, seconds=wait.total_seconds()))


def _at_port(world: World, wait: timedelta) -> dist.Store:
    """Return the store at the world's address and port; rank 0 hosts it, unless the launcher does.

    Other ranks wait until a server listens there, for the time `wait` at most.
    """
    assert world.address is not None, "World checks it"
    assert world.port is not None, "World checks it"
    if world.rank > 0 or world.agent_store:
        found = network.addresses_of(world.address)
        who = f"rank {world.rank}"
        address = port_discovery.await_port(found, world.port, who, wait.total_seconds())
        return connect_store(address, world.port)
    try:
        return host_store(world.port, loopback=network.listens_locally(world.address))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise WorldError(
                f"port {world.port} cannot be opened: {network.reason(error)}"
            ) from error
        raise WorldError(
            f"port {world.port} on {world.address} is taken",
            hint="start with `lockstep run`, which chooses a free one, or set MASTER_PORT",
        ) from error
