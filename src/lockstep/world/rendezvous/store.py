"""Open, host and connect to the `torch.distributed` stores of a rendezvous."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.world.network import LOOPBACK, listen, reason
from lockstep.world.rendezvous.private_file import open_private

#: Timeout of collectives and of waits for keys: the default of torch.distributed.
TIMEOUT = timedelta(minutes=30)
#: Timeout of a new client's connection to a store. Client and server look up each other's names in DNS
#: (torch 2.13), which takes half a minute if the DNS server does not answer.
_STORE_TIMEOUT = timedelta(seconds=60)
#: Maximum length of the first key in a store's file; a larger number means another kind of file.
_LONGEST_KEY = 1 << 16


def open_file(path: Path) -> dist.Store:
    """Open or make a `FileStore` that only this user can read, since it contains secrets of the run.

    Raises:
        WorldError: if the file cannot be opened, belongs to another user, or is not a store.
    """
    if not path.parent.is_dir():
        raise WorldError(
            f"the directory of the rendezvous file {path} does not exist",
            hint="it must be a directory that all nodes share",
        )
    # torch would wait minutes for an unreadable file, and forever in a file of another kind.
    try:
        with os.fdopen(open_private(path), "r+b") as file:
            head = file.read(4)
    except OSError as error:
        raise WorldError(f"the rendezvous file {path} cannot be opened: {reason(error)}") from error
    if int.from_bytes(head, sys.byteorder) > _LONGEST_KEY:
        raise WorldError(
            f"{path} is there, and is no rendezvous file; expected none",
            hint="give file:// the path of a file that is not there yet",
        )
    return dist.FileStore(str(path), -1)


def launch_store(file: str) -> dist.Store:
    """Open the `FileStore` of a launch whose ranks all have the same launcher.

    Unlike a port, the file is not accessible to other users.
    """
    return dist.FileStore(file, -1)


def connect_store(address: str, port: int) -> dist.TCPStore:
    """Connect to the `TCPStore` at an address and port.

    Raises:
        WorldError: if the server at the port is not a store.
    """
    made: list[dist.TCPStore | dist.DistError] = []

    def make() -> None:
        try:
            made.append(dist.TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT))
        except dist.DistError as error:
            made.append(error)

    # torch ignores its timeout if the server at the port never answers.
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
    """Return a new `TCPStore` that this process hosts at `port`, or at any free port if `port` is 0.

    The store listens on the loopback interface only if `loopback`, otherwise on all interfaces.

    Raises:
        OSError: if the port is not free.
    """
    listener = listen(port, loopback=loopback)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
