"""Addresses of the parameter servers of a launch, and authentication of workers and servers.

A server is not a rank. It gets the environment variables of workers, and writes its address to the launch's
store. One variable is a secret, which no message between workers and servers contains.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from collections.abc import Mapping

import torch.distributed as dist

from lockstep.errors import PeerError, WorldError
from lockstep.world import network
from lockstep.world.environments.init_method import STORE
from lockstep.world.environments.torchrun import TOKEN
from lockstep.world.environments.variables import master
from lockstep.world.model import World
from lockstep.world.network import LOOPBACK
from lockstep.world.rendezvous.port_discovery import await_port
from lockstep.world.rendezvous.rank_rendezvous import join_timeout
from lockstep.world.rendezvous.store import connect_store, launch_store
from lockstep.world.waiting import await_any

_PREFIX = "lockstep/servers"
_CONNECT_SECONDS = 30.0
#: Host name or IP address, and port, at which a parameter server listens.
Address = tuple[str, int]


def token_of(environ: Mapping[str, str]) -> str:
    """Return the secret of the launch from the environment; raise a `WorldError` if it has none."""
    if not environ.get(TOKEN):
        raise WorldError("the environment of this process names no launch with servers")
    return environ[TOKEN]


def proof(token: str, role: str, nonces: tuple[str, str]) -> str:
    """Return a process's proof that it has the secret `token`, valid for one connection.

    The proof is an HMAC-SHA256 in hexadecimal digits.

    Args:
        token: the secret of the launch.
        role: `worker` or `server`, the process that proves itself.
        nonces: a random text of the server and a random text of the worker.
    """
    text = "/".join((role, *nonces)).encode(errors="replace")
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def listen(address: str) -> tuple[socket.socket, Address]:
    """Return a socket that listens at `address`, and the address and port at which workers reach it.

    If this machine does not have `address`, as in a container, the socket listens at all addresses.
    """
    if network.listens_locally(address):
        listener = network.listen(0, loopback=True)
        return listener, (LOOPBACK, listener.getsockname()[1])
    for candidate in network.addresses_of(address):
        family = socket.AF_INET6 if ":" in candidate else socket.AF_INET
        # In a container, an address of this node may not exist.
        with contextlib.suppress(OSError):
            listener = socket.create_server((candidate, 0), family=family, backlog=1024)
            return listener, (candidate, listener.getsockname()[1])
    listener = network.listen(0, loopback=False)
    return listener, (address, listener.getsockname()[1])


def publish(environ: Mapping[str, str], index: int, place: Address) -> None:
    """Write the address `place` of server number `index` to the launch's key-value store.

    `environ`: environment variables, which have the address of the store.
    """
    store = _store(environ.get(STORE), *launch_address(environ))
    store.set(str(index), json.dumps(place))


def find(world: World, count: int) -> list[Address]:
    """Wait until all `count` servers have written their addresses to the store; return them.

    `world`: the world of this rank, which has the address of the launch's store.

    Raises:
        PeerError: after a timeout, or if the store has ended.
    """
    assert world.address is not None
    assert world.port is not None
    store = _store(world.launch_file, world.address, world.port)
    keys = [str(index) for index in range(count)]
    try:
        if await_any(store, [keys], join_timeout().total_seconds()) is not None:
            return [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise PeerError(f"the store of the launch is gone: {error}") from error
    raise PeerError(
        f"not all of {count} server(s) have told where they are within {join_timeout()}"
    )


def connect(place: Address, name: str) -> socket.socket:
    """Return a connected socket to the server at `place`; `name` is used in error messages.

    Raises:
        PeerError: if the server cannot be reached.
    """
    host, port = place
    why: OSError | None = None
    for address in network.addresses_of(host):
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            why = error
        else:
            connection.settimeout(None)
            return connection
    raise PeerError(
        f"{name} at {host} on port {port} cannot be reached: {why}",
        hint=f"what happened to {name} is the cause; see its log",
    ) from why


def launch_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the launch's store, from environment variables.

    Raises:
        WorldError: if the variables are not set.
    """
    address, port = master(environ)
    if address is None or port is None:
        raise WorldError("the environment of this server names no launch to serve")
    return address, port


def _store(file: str | None, address: str, port: int) -> dist.Store:
    if file:
        return dist.PrefixStore(_PREFIX, launch_store(file))
    found = await_port(network.addresses_of(address), port, "the launch's store", _CONNECT_SECONDS)
    return dist.PrefixStore(_PREFIX, connect_store(found, port))
