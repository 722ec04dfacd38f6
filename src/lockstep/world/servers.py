"""Where the servers of a launch are: each leaves its address and a secret in the launch's store.

Servers are no ranks. They know the launch from the variables that its workers have, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from lockstep.errors import PeerError, WorldError
from lockstep.world import door, network
from lockstep.world.environments.variables import meeting_place
from lockstep.world.meet import LOOPBACK, connect_store, join_timeout
from lockstep.world.model import World
from lockstep.world.waiting import await_any

#: What ends a server, sent by its launcher. It ignores what is sent to all processes of a job: as long as
#: workers may come, it serves. Nobody else uses this signal, and it ends a server that is not ready for it.
END = signal.SIGRTMIN + 6
_PREFIX = "lockstep/servers"
_CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server listens.

    Attributes:
        address: of its node, as the workers reach it.
        port: chosen by the system.
        token: what a worker of the launch proves itself with.
    """

    address: str
    port: int
    token: str


def open_place(environ: Mapping[str, str]) -> tuple[socket.socket, Place]:
    """Return a socket that listens where the workers of the launch reach it, and its place.

    Raises:
        WorldError: if the environment names no launch.
    """
    address, _ = _launch(environ)
    token = secrets.token_hex(16)
    if door.listens_locally(address):
        listener = door.listen(0, loopback=True)
        return listener, Place(address=LOOPBACK, port=listener.getsockname()[1], token=token)
    for candidate in network.addresses_of(address):
        family = socket.AF_INET6 if ":" in candidate else socket.AF_INET
        # An address of this node may have another name inside of a container.
        with contextlib.suppress(OSError):
            listener = socket.create_server((candidate, 0), family=family, backlog=1024)
            return listener, Place(address=candidate, port=listener.getsockname()[1], token=token)
    listener = door.listen(0, loopback=False)
    return listener, Place(address=address, port=listener.getsockname()[1], token=token)


def publish(environ: Mapping[str, str], index: int, place: Place) -> None:
    """Tell the workers of the launch where server `index` is."""
    address, port = _launch(environ)
    _store(address, port).set(str(index), json.dumps(asdict(place)))


def find(world: World, count: int) -> list[Place]:
    """Return where the servers of the launch are, waiting until all have said so.

    Raises:
        PeerError: if one does not.
    """
    assert world.address is not None
    assert world.port is not None
    store = _store(world.address, world.port)
    keys = [str(index) for index in range(count)]
    try:
        if await_any(store, [keys], join_timeout().total_seconds()) is not None:
            return [Place(**json.loads(store.get(key))) for key in keys]
    except RuntimeError as error:
        raise PeerError(f"the store of the launch is gone: {error}") from error
    raise PeerError(
        f"not all of {count} server(s) have told where they are within {join_timeout()}"
    )


def connect(place: Place, name: str) -> socket.socket:
    """Return a connection to a server; it listens before it says where it is.

    Raises:
        PeerError: if it listens no more.
    """
    why: OSError | None = None
    for address in network.addresses_of(place.address):
        try:
            connection = socket.create_connection((address, place.port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            why = error
        else:
            connection.settimeout(None)
            return connection
    raise PeerError(
        f"{name} at {place.address} on port {place.port} cannot be reached: {why}",
        hint=f"what happened to {name} is the cause; see its log",
    ) from why


def _launch(environ: Mapping[str, str]) -> tuple[str, int]:
    address, port = meeting_place(environ)
    if address is None or port is None:
        raise WorldError("the environment of this server names no launch to serve")
    return address, port


def _store(address: str, port: int) -> dist.Store:
    found = door.await_port(
        network.addresses_of(address), port, "the launch's store", _CONNECT_SECONDS
    )
    return dist.PrefixStore(_PREFIX, connect_store(found, port))
