"""How launchers get to the store where they meet, and how they begin one.

Behind the door of a host, at a given port, or in the file of a shared directory. Where launchers come
and go, the door stays open for as long as its host lives.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.launch.nodes import RendezvousConfig
from lockstep.launch.rendezvous_file import RendezvousFile
from lockstep.world import host, network, port_discovery
from lockstep.world.meet import connect_store, host_store
from lockstep.world.port_discovery import PortDiscovery
from lockstep.world.waiting import Check

_SEE_OFF_SECONDS = 2.0
_AGAIN_SECONDS = 0.25


class RdzvEndpoint:
    """How launchers that come and go get to the store where they meet.

    Args:
        store: where they meet.
        hosts: whether this launcher hosts it.
        closing: called at the end.
    """

    def __init__(self, store: dist.Store, closing: contextlib.ExitStack, *, hosts: bool) -> None:
        self.store = store
        self.hosts = hosts
        self._closing = closing

    def close(self) -> None:
        """Let nobody in any more; leave no file behind."""
        self._closing.close()


def enter(party: RendezvousConfig, seconds: float, check: Check) -> RdzvEndpoint:
    """Find the store of a launch whose launchers come and go, or begin one; it stays open for others.

    Args:
        party: how they find each other.
        seconds: how long the host of the store may take to come.
        check: called again and again meanwhile.

    Raises:
        UnreachableError: if no packet reaches the host of the store.
        WorldError: if it does not come.
    """
    with contextlib.ExitStack() as stack:
        hosts = False
        if party.directory is not None:
            store = _open_file(party, seconds, check, stack)
        else:
            if party.index is None:
                hosts = stack.enter_context(host_lock(party.name)) and is_here(party)
            else:
                hosts = party.index == 0
            store = _serve_at_host(party, stack) if hosts else knock(party, seconds, check)
        return RdzvEndpoint(store, stack.pop_all(), hosts=hosts)


def _open_file(
    party: RendezvousConfig, seconds: float, check: Check, stack: contextlib.ExitStack
) -> dist.Store:
    """Open the file of a launch; one that is over is given the time to go."""
    assert party.directory is not None
    deadline = time.monotonic() + seconds
    while True:
        file = RendezvousFile(party.directory, party.name)
        store = file.open()
        if not store.check(["over"]):
            stack.callback(file.close)
            return store
        file.close()
        check()
        if time.monotonic() > deadline:
            raise WorldError(
                f"a launch that has ended still keeps its file in {party.directory}",
                hint="give this launch an --rdzv-id of its own",
            )
        time.sleep(_AGAIN_SECONDS)


def _serve_at_host(party: RendezvousConfig, stack: contextlib.ExitStack) -> dist.Store:
    """Host the store, behind a door that stays open."""
    assert party.address is not None
    loopback = port_discovery.listens_locally(party.address)
    store = host_store(0, loopback=loopback)
    entrance = PortDiscovery(
        name=party.name,
        store_port=store.port,
        count=1 << 30,
        loopback=loopback,
        port=party.port,
    )
    listener = (
        entrance.listen()
    )  # here, and not in the thread, whose errors the launcher would not see
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise _ClosedError

    def serve() -> None:
        with listener, contextlib.suppress(_ClosedError):
            entrance.serve_at(listener, threading.TIMEOUT_MAX, check)

    thread = threading.Thread(target=serve, name="lockstep-door", daemon=True)
    thread.start()
    stack.callback(thread.join, _SEE_OFF_SECONDS)
    stack.callback(stop.set)
    return store


class _ClosedError(Exception):
    """The door is to be closed."""


def knock(party: RendezvousConfig, seconds: float, check: Check) -> dist.Store:
    """Go through the door of the host of the store."""
    assert party.address is not None
    answer = port_discovery.knock(
        network.addresses_of(party.address),
        party.name,
        f"node {party.index}" if party.index is not None else _anybody(),
        token=secrets.token_hex(8),
        seconds=seconds,
        port=party.port,
        check=check,
    )
    return connect_store(answer.address, answer.port)


def elsewhere(party: RendezvousConfig) -> str | None:
    """Return a hint, where the host of the store is to be one that this launcher is not on."""
    with contextlib.suppress(
        WorldError
    ):  # a name that this host doesn't know may be right elsewhere
        if is_here(party):
            return None
    own = ", ".join(f"{one.name} {one.address}" for one in network.interfaces())
    return f"{party.address} is no address of {host.name()} ({own}): is this node 0?"


def _anybody() -> str:
    return f"a node on {host.name()}, process {os.getpid()}"


def is_here(party: RendezvousConfig) -> bool:
    """Return whether the endpoint's host is this one."""
    assert party.address is not None
    own = {one.address for one in network.interfaces()} | {host.name()}
    found = {party.address, *network.addresses_of(party.address)}
    # Some systems let a host's own name mean an address of the loopback interface.
    return bool(own & found) or any(port_discovery.is_loopback(address) for address in found)


@contextlib.contextmanager
def host_lock(name: str) -> Iterator[bool]:
    """Hold a lock among the launchers of this host that gather under `name`; give whether it was free."""
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            # An abstract address: it goes with its process, however that ends.
            lock.bind(f"\0lockstep/{os.getuid()}/{digest}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            is_free = False
        else:
            is_free = True
        yield is_free
