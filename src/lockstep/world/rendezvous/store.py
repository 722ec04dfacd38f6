"""`torch.distributed` stores for the rendezvous: in a file, or at a port."""

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

#: How long to wait for collectives and keys of other ranks: torch.distributed's own default.
TIMEOUT = timedelta(minutes=30)
#: How long a store may take to answer a new client, once something listens at its port. Both ask the
#: resolver for each other's names (torch 2.13), which takes half a minute where it does not answer.
_STORE_TIMEOUT = timedelta(seconds=60)
#: The file of a store begins with the length of a short key.
_LONGEST_KEY = 1 << 16


def open_file(path: Path) -> dist.Store:
    """Return the store in a file that only this user can read: the run's secrets are in it.

    Raises:
        WorldError: if it cannot be opened, is another user's, or is no store.
    """
    if not path.parent.is_dir():
        raise WorldError(
            f"the directory of the rendezvous file {path} does not exist",
            hint="it must be a directory that all nodes share",
        )
    # torch would wait for minutes for a file that cannot be opened, and for ever in one that is no store.
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
    """Return a client of the store of a launch whose launcher starts all ranks.

    It is a file and no port: the system keeps other users from it.
    """
    return dist.FileStore(file, -1)


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
