"""From a world to the store where its ranks meet: made here, never guessed.

environment ── World ── store ── roll call ── survey of the nodes ── World, complete
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import LockstepError, PeerError, UnreachableError, UsageError, WorldError
from lockstep.world import clocks, host, membership_check, mpi, network, port_discovery
from lockstep.world.connectivity_check import survey
from lockstep.world.environments.lockstep import MARK
from lockstep.world.model import World
from lockstep.world.port_discovery import PortDiscovery
from lockstep.world.waiting import await_any

#: How long collectives and notes of other ranks are waited for: torch.distributed's own default.
TIMEOUT = timedelta(minutes=30)
_JOIN_VARIABLE = "LOCKSTEP_JOIN_TIMEOUT"
_JOIN_SECONDS = 300.0
#: How far apart nodes may come to the survey, and how long ranks wait for the one of their node that takes
#: part in it.
_NAMES_SECONDS, _SURVEY_SECONDS = 30.0, 120.0
#: How long a store may take to answer a new client, once something listens at its port. Both ask the
#: resolver for each other's names (torch 2.13), which takes half a minute where it does not answer.
_STORE_TIMEOUT = timedelta(seconds=60)
#: A file in which ranks meet begins with the length of a short key.
_LONGEST_KEY = 1 << 16
#: Where a store is that serves one host alone.
LOOPBACK = "127.0.0.1"

#: Runs of this process so far. All ranks make the same runs in the same order, so that the number keeps
#: the notes of one run from being taken for another's.
_runs = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks have met.

    Attributes:
        world: who this rank is, complete: its local and node numbers are known.
        store: a key-value store that all ranks reach; fresh for every run and generation.
        number: how many runs this process has made before.
        ours: whether the store was made here, so that this process leaves it in good order.
    """

    world: World
    store: dist.Store
    number: int
    ours: bool

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, outside of collectives, that this one cannot go on."""
        if self.world.size == 1:
            return
        what = str(error).partition("\n")[0]
        # The store may be gone with its host; then there is nobody to tell.
        with contextlib.suppress(RuntimeError):
            if self.store.add("failures", 1) == 1:
                text = f"rank {self.world.rank} failed: {type(error).__name__}: {what}"
                self.store.set("failed", text)

    def heard(self, seconds: float) -> str | None:
        """Return what another rank has told of its failure, or tells within `seconds`."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            if await_any(self.store, [["failed"]], seconds) is not None:
                return self.store.get("failed").decode()
        return None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks if the body fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def ready(self) -> None:
        """Wait until all ranks are ready for what they can only do together.

        Raises:
            PeerError: if one cannot go on.
        """
        self.conclude("ready", "1", lambda _: "1", "begin")

    def conclude(self, key: str, own: str, of: Callable[[list[str]], str], what: str) -> str:
        """Return what rank 0 concludes from the texts of all ranks; all ranks call it together.

        Rank 0 reads all texts and every rank reads one answer: N ranks read 2 N keys.

        Args:
            key: names the question; used once per meeting.
            own: the text of this rank.
            of: makes the answer from all texts, in rank order; called on rank 0 alone.
            what: what ranks come to, for the error.

        Raises:
            PeerError: as `wait`.
        """
        keys = [f"{key}/{rank}" for rank in range(self.world.size)]
        self.store.set(keys[self.world.rank], own)
        if self.world.is_main:
            self.wait(keys, what)
            self.store.set(key, of([self.store.get(one).decode() for one in keys]))
        self.wait([key], what)
        return self.store.get(key).decode()

    def wait(self, keys: Sequence[str], what: str) -> None:
        """Wait until `keys` are in the store.

        Raises:
            PeerError: if a rank cannot go on, or they are not there after the time of a collective.
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


def meet(world: World, store: dist.Store | None = None) -> Meeting:
    """Meet the other ranks.

    A store of the user's, or the one of a process group that the script has made, is taken as it is.

    Args:
        world: who this process is.
        store: a store that all ranks have, of the user's own.

    Raises:
        UnreachableError: if another rank or node cannot be reached.
        WorldError: if ranks don't come, or what they say of themselves doesn't fit together.
        UsageError: if a variable makes no sense.
    """
    number = next(_runs)
    if store is None and dist.is_initialized():
        world = _as_in_group(world)
    if world.size == 1:
        return Meeting(world=world, store=dist.HashStore(), number=number, ours=True)
    given = store
    if given is None and dist.is_initialized():
        given = dist.distributed_c10d._get_default_store()
    wait = join_timeout()
    base = _reach_store(world, number, wait) if given is None else given
    fresh = dist.PrefixStore(f"lockstep/{world.generation}/{number}", base)
    # What `lockstep run` started, its agents have called and surveyed; but a file may be a stale one.
    if world.environment != "lockstep" or world.file is not None:
        world = _complete(world, dist.PrefixStore("meet", fresh), number, wait)
    elif port_discovery.is_loopback(world.address):
        _use_interface("lo")
    return Meeting(world=world, store=fresh, number=number, ours=given is None)


def join_timeout() -> timedelta:
    """Return how long others may take to come: `LOCKSTEP_JOIN_TIMEOUT`, in seconds.

    Raises:
        UsageError: if it is no positive number.
    """
    text = os.environ.get(_JOIN_VARIABLE)
    if text is None:
        return timedelta(seconds=_JOIN_SECONDS)
    with contextlib.suppress(ValueError, OverflowError):
        if float(text) > 0:
            return timedelta(seconds=float(text))
    raise UsageError(f"{_JOIN_VARIABLE} is {text!r}; expected a positive number of seconds")


def leave(meeting: Meeting) -> None:
    """Leave in good order: rank 0, which may host the store, goes last."""
    world, store = meeting.world, meeting.store
    launchers = world.agent_store or world.launch_file is not None
    if not meeting.ours or launchers or world.size == 1:
        return
    store.set(f"left/{world.rank}", "1")
    if world.is_main:
        meeting.wait([f"left/{rank}" for rank in range(world.size)], "the end")
        if world.file is not None:
            _file_of(world, meeting.number).unlink(missing_ok=True)


def _as_in_group(world: World) -> World:
    """Return the world of the process group that the script has made, whatever the environment says."""
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
    card = membership_check.Card.of(world, os.getpid())
    roll = dist.PrefixStore("roll", store)
    try:
        place = membership_check.call(roll, world.rank, card, wait)
    except WorldError:
        if world.file is not None and world.is_main and membership_check.came_once(roll, 0):
            _file_of(world, number).unlink(missing_ok=True)  # a meeting of nobody else's
        raise
    world = membership_check.placed(world, place)
    if world.node_count == 1:
        _use_interface("lo")
    else:
        _survey(world, store)
    return world


def _survey(world: World, store: dist.Store) -> None:
    """Let one rank of each node find out where the others reach it, and tell its neighbours."""
    mine = f"interface/{world.node_rank}"
    if world.local_rank == 0:
        _survey_nodes(world, dist.PrefixStore("survey", store), store, mine)
    if await_any(store, [[mine]], _SURVEY_SECONDS) is None:
        raise UnreachableError(
            f"the first rank of node {world.node_rank} has not tried the network"
        )
    interface, _, problem = store.get(mine).decode().partition("\n")
    if problem:
        raise UnreachableError(problem)
    _use_interface(interface)


def _survey_nodes(world: World, store: dist.Store, notes: dist.Store, mine: str) -> None:
    notes.set(f"name/{world.node_rank}", host.name())
    names = [f"name/{number}" for number in range(world.node_count)]
    await_any(notes, [names], _NAMES_SECONDS)
    labels = [
        f"node {number} ({notes.get(name).decode() if notes.check([name]) else 'not here'})"
        for number, name in enumerate(names)
    ]
    try:
        found = survey(store, index=world.node_rank, labels=labels, interface=chosen_interface())
    except LockstepError as error:
        notes.set(mine, f"\n{error}")
        raise
    notes.set(mine, found[world.node_rank].interface)
    clocks.compare(dist.PrefixStore("clocks", store), world.node_rank, labels)


def chosen_interface() -> str | None:
    """Return the interface that the user chose, by `LOCKSTEP_INTERFACE` or as Gloo's own variable."""
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # It takes several, too; and in a worker it is what that worker's launcher chose.
    is_one = gloo and "," not in gloo and MARK not in os.environ
    return os.environ.get("LOCKSTEP_INTERFACE") or (gloo if is_one else None)


def _use_interface(name: str) -> None:
    # Gloo and NCCL would otherwise take what the host name resolves to, or what looks like a network.
    overrules = "LOCKSTEP_INTERFACE" in os.environ
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if overrules or variable not in os.environ:
            os.environ[variable] = name


def _reach_store(world: World, number: int, wait: timedelta) -> dist.Store:
    if world.file is not None:
        return _open_file(_file_of(world, number))
    if world.launch_file is not None:
        return launch_store(world.launch_file)
    if world.by_mpi:
        name, addresses = mpi.agree(world)
        return _through_door(world, name, addresses, wait)
    assert world.address is not None, "World checks it"
    if world.key is not None and world.port is None:
        name = f"{world.key}/{world.generation}/{number}"
        addresses = () if world.is_main else network.addresses_of(world.address)
        return _through_door(world, name, addresses, wait)
    if world.rank == 0 and not world.agent_store:
        return _host(world)
    address = _first_reachable(world, wait)
    assert world.port is not None, "World checks it"
    return connect_store(address, world.port)


def _file_of(world: World, number: int) -> Path:
    assert world.file is not None
    return Path(world.file if number == 0 else f"{world.file}.{number}")


def _open_file(path: Path) -> dist.Store:
    if not path.parent.is_dir():
        raise WorldError(
            f"the directory of the meeting file {path} does not exist",
            hint="it must be a directory that all nodes share",
        )
    # torch would wait for minutes for a file that cannot be opened, and for ever in one that is no store.
    try:
        path.touch()
        with path.open("r+b") as file:
            head = file.read(4)
    except OSError as error:
        raise WorldError(
            f"the meeting file {path} cannot be opened: {port_discovery.reason(error)}"
        ) from error
    if int.from_bytes(head, sys.byteorder) > _LONGEST_KEY:
        raise WorldError(
            f"{path} is there, and no file in which ranks have met; expected none",
            hint="give file:// the path of a file that is not there yet",
        )
    return dist.FileStore(str(path), -1)


def launch_store(file: str) -> dist.Store:
    """Return a client of the store of a launch whose launcher starts all ranks.

    It is a file and no port: the system keeps other users from it.
    """
    return dist.FileStore(file, -1)


def _through_door(world: World, name: str, addresses: Sequence[str], wait: timedelta) -> dist.Store:
    loopback = port_discovery.listens_locally(world.address)
    if world.rank == 0:
        store = host_store(0, loopback=loopback)
        guests = [f"rank {rank}" for rank in range(1, world.size)]
        PortDiscovery(name=name, store_port=store.port, guests=guests, loopback=loopback).serve(
            wait.total_seconds()
        )
        return store
    answer = port_discovery.knock(
        addresses,
        name,
        f"rank {world.rank}",
        token=secrets.token_hex(8),
        seconds=wait.total_seconds(),
    )
    return connect_store(answer.address, answer.port)


def connect_store(address: str, port: int) -> dist.TCPStore:
    """Return a client of the store at an address and a port.

    Raises:
        WorldError: if what listens there is no store.
    """
    made: list[dist.TCPStore | dist.DistError] = []

    def make() -> None:
        try:
            made.append(dist.TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT))
        except dist.DistError as error:
            made.append(error)

    # torch never gives up on a program that listens and says nothing, whatever the timeout.
    thread = threading.Thread(target=make, name="lockstep-connect", daemon=True)
    thread.start()
    thread.join(1.5 * _STORE_TIMEOUT.total_seconds())
    store = made[0] if made else None
    if not isinstance(store, dist.TCPStore):
        why = "it says nothing" if store is None else str(store).partition("\n")[0]
        raise WorldError(
            f"what listens at {address} on port {port} is no store: {why}",
            hint="another program has the port: choose another MASTER_PORT",
        )
    store.set_timeout(TIMEOUT)
    return store


def host_store(port: int, *, loopback: bool) -> dist.TCPStore:
    """Host a store at `port`, 0 for one that the system chooses.

    Raises:
        OSError: if the port is taken.
    """
    listener = port_discovery.listen(port, loopback=loopback)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _host(world: World) -> dist.Store:
    assert world.port is not None
    try:
        return host_store(world.port, loopback=port_discovery.listens_locally(world.address))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise WorldError(
                f"port {world.port} cannot be opened: {port_discovery.reason(error)}"
            ) from error
        raise WorldError(
            f"port {world.port} on {world.address} is taken",
            hint="start with `lockstep run`, which chooses a free one, or set MASTER_PORT",
        ) from error


def _first_reachable(world: World, wait: timedelta) -> str:
    """Return the address of the host at which its store answers."""
    assert world.address is not None
    assert world.port is not None
    return port_discovery.await_port(
        network.addresses_of(world.address), world.port, f"rank {world.rank}", wait.total_seconds()
    )
