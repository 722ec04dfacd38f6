"""`Endpoint`: the store through which launchers find each other, on a host or in a shared directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import UnreachableError, UsageError, WorldError
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.world import host, network
from lockstep.world.environments import kubernetes
from lockstep.world.rendezvous import port_discovery
from lockstep.world.rendezvous.private_file import open_private
from lockstep.world.rendezvous.store import connect_store, host_store
from lockstep.world.waiting import Check

_AGAIN_SECONDS = 0.25
#: Seconds for which the addresses of a pod's host name are tried before the name is looked up again.
_LOOK_UP_SECONDS = 10.0
_TAKEN_HINT = "another launch with this name runs on this host: give each an --rdzv-id of its own"


@dataclass(kw_only=True)
class Endpoint:
    """The rendezvous store of launchers, with the resources to release when the store is closed.

    Attributes:
        entrance: exit stack that closes the port discovery of a hosted store and the lock of this host.
        hosts: whether this launcher hosts the store.
        file: the store, if it is a file in a shared directory.
    """

    store: dist.Store
    entrance: contextlib.ExitStack
    hosts: bool = False
    file: RendezvousFile | None = None

    def stop_announcing(self) -> None:
        """Stop answering port discovery of other launchers.

        The port of port discovery and the lock of this host are released.
        """
        self.entrance.close()

    def close(self) -> None:
        """Stop answering the port discovery, and release the store's file."""
        self.entrance.close()
        if self.file is not None:
            self.file.close()
            self.file = None


def enter(config: RendezvousConfig, check: Check) -> Endpoint:
    """Host the rendezvous store of a launch, or connect to it; return its endpoint.

    `check` is called repeatedly during waits, and may raise to end them.

    Raises:
        UnreachableError: if no packet reaches the host of the store.
        WorldError: if the host of the store does not answer in time.
    """
    with contextlib.ExitStack() as stack:
        if config.directory is not None:
            file = _open_file(config.directory, config, check)
            return Endpoint(store=file.store, entrance=stack, file=file)
        assert config.address is not None, "a rendezvous has a directory or a host"
        if config.index is None:
            hosts = stack.enter_context(host_lock(config.name)) and network.is_here(config.address)
        else:
            hosts = config.index == 0
        if not hosts:
            try:
                return Endpoint(store=_find(config, check), entrance=stack.pop_all())
            except UnreachableError:
                raise
            except WorldError as error:
                if config.index is not None or not network.is_here(config.address):
                    raise
                raise WorldError(error.message, hint=_TAKEN_HINT) from error
        loopback = network.listens_locally(config.address)
        store = host_store(0, loopback=loopback)
        announcer = port_discovery.announce(
            config.name, store.port, loopback=loopback, port=config.port
        )
        stack.enter_context(announcer)
        return Endpoint(store=store, entrance=stack.pop_all(), hosts=True)


def _find(config: RendezvousConfig, check: Check) -> dist.Store:
    """Connect to the store on the host of launcher 0, and return the store.

    In a Kubernetes pod, the host name is looked up repeatedly until the join timeout: the name has no
    address before its pod runs, and another address after the pod was replaced. `check` is called
    repeatedly during the wait, and may raise to end it.
    """
    assert config.address is not None, "the store is on a host"
    deadline = time.monotonic() + config.seconds
    while True:
        left = deadline - time.monotonic()
        again = kubernetes.is_pod(os.environ) and left > _LOOK_UP_SECONDS
        try:
            place = port_discovery.find(
                network.addresses_of(config.address),
                config.name,
                "this node" if config.index is None else f"node {config.index}",
                seconds=min(left, _LOOK_UP_SECONDS) if again else left,
                port=config.port,
                check=check,
            )
            return connect_store(*place)
        except WorldError:
            if not again:
                raise
        check()
        time.sleep(_AGAIN_SECONDS)


def missing_hint(config: RendezvousConfig, *, hosts: bool) -> str:
    """Return the hint for an error about missing launchers.

    `hosts` is whether this launcher hosts the rendezvous store.
    """
    if not config.fixed:
        return "--nnodes MIN:MAX says how many must come, --join-timeout how long they may take"
    if config.directory is not None:
        return "if the others say the same, the directory is not shared between the nodes"
    assert config.address is not None, "a rendezvous has a directory or a host"
    here = not hosts
    with contextlib.suppress(WorldError):  # an unknown host name
        here = here or network.is_here(config.address)
    if here:
        return "look at the output of the others: are they started, and on which node?"
    own = ", ".join(map(str, network.interfaces()))
    return f"{config.address} is no address of {host.name()} ({own}): is this node 0?"


@contextlib.contextmanager
def host_lock(name: str) -> Iterator[bool]:
    """Context manager: take a lock that one launcher of this host can hold.

    It yields whether this launcher got the lock. `name` identifies the lock.
    """
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    is_free = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            # An abstract socket address, which the kernel frees when the process ends.
            lock.bind(f"\0lockstep/{os.getuid()}/{digest}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            is_free = False
        yield is_free


def _open_file(directory: Path, config: RendezvousConfig, check: Check) -> RendezvousFile:
    """Open a launch's rendezvous file in `directory`; wait while it is that of an ended launch.

    A launcher of the ended launch may still hold the file's lock. `check` is called repeatedly during the
    wait, and may raise to end it.

    Raises:
        WorldError: if the ended launch has not released its file after `config.seconds`.
    """
    deadline = time.monotonic() + config.seconds
    while True:
        file = RendezvousFile(directory, config.name)
        if not file.store.check(["over"]):
            return file
        file.close()
        check()
        if time.monotonic() > deadline:
            raise WorldError(
                f"a launch that has ended still keeps its file in {directory}",
                hint="give this launch an --rdzv-id of its own",
            )
        time.sleep(_AGAIN_SECONDS)


class RendezvousFile:
    """The rendezvous store of one launch in a file of a shared directory, with a lock file.

    Each launcher keeps a shared lock until its process ends. A launcher that gets the lock exclusively is
    the only one, and removes a store file left by an earlier launch.

    Raises:
        UsageError: if the directory does not exist, is not writable or does not support locks.
        WorldError: if the file belongs to another user.
    """

    def __init__(self, directory: Path, name: str) -> None:
        if not directory.is_dir():
            raise UsageError(
                f"the directory {directory} does not exist on {host.name()}",
                hint="--rdzv-endpoint file:///DIRECTORY needs one that all nodes share",
            )
        self._path = directory / f"lockstep-{name.replace('/', '-')}"
        self._lock_path = self._path.with_name(f"{self._path.name}.lock")
        self._lock = self._take_lock()
        # torch would make the file readable for all users, with the secret of the launch.
        os.close(open_private(self._path))
        self.store: dist.Store = dist.FileStore(str(self._path), -1)

    def close(self) -> None:
        """Release the lock; if no other launcher has it, remove the store's file and the lock file."""
        with contextlib.suppress(OSError):  # another launcher has it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The files may have been removed by hand, and made anew.
            if self._is_in_place(self._lock):
                self._path.unlink(missing_ok=True)
                self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> int:
        while True:
            try:
                lock = open_private(self._lock_path)
            except OSError as error:
                raise UsageError(
                    f"{self._path.parent} cannot be written: {network.reason(error)}"
                ) from None
            try:
                self._share(lock)
            except BaseException:
                os.close(lock)
                raise
            # An earlier launch may have removed the lock file after it was opened here.
            if self._is_in_place(lock):
                return lock
            os.close(lock)

    def _is_in_place(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), self._lock_path.stat())
        except FileNotFoundError:
            return False

    def _share(self, lock: int) -> None:
        """Take the lock in shared mode; remove an old store if no other launcher has the lock.

        `lock` is the descriptor of the open lock file. The old store is removed before the lock is shared.
        """
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another launcher uses the file
        except OSError as error:
            raise UsageError(
                f"{self._path.parent} has no locks: {network.reason(error)}",
                hint="mount it with locks (flock), or let a host keep the store: --rdzv-endpoint HOST",
            ) from None
        else:
            if self._is_in_place(lock) and os.path.lexists(self._path):
                os.close(open_private(self._path))  # raises an error for another user's file
                self._path.unlink(missing_ok=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
