"""Servers as threads of the test, and workers that connect to them one by one."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.event_loop import Server
from tests.unit.threads import together

TOKEN = "0123456789abcdef"  # noqa: S105 - of servers that live as long as a test
#: No answer of a server takes as long, unless it waits for another worker.
SECONDS = 20.0


class Service:
    """Some servers, and who is connected to them."""

    def __init__(self, count: int) -> None:
        self._stack = contextlib.ExitStack()
        self.ports: list[int] = []
        self.servers: list[Server] = []
        for _ in range(count):
            listener = socket.create_server(("127.0.0.1", 0))
            server = Server(listener, TOKEN)
            thread = threading.Thread(target=server.run)
            thread.start()
            self.ports.append(listener.getsockname()[1])
            self.servers.append(server)
            self._stack.callback(thread.join, SECONDS)
            self._stack.callback(server.end)

    def connect(self, index: int) -> socket.socket:
        """Return a connection to a server that nothing has been said on."""
        connection = socket.create_connection(("127.0.0.1", self.ports[index]), timeout=SECONDS)
        self._stack.callback(connection.close)
        return connection

    def join(self, rank: int, size: int, replicas: int, model: str = "model") -> Clients:
        """Connect a worker to all servers."""
        clients = []
        for index in range(len(self.ports)):
            client = Client(self.connect(index), index)
            numbers = {"rank": rank, "size": size, "replicas": replicas, "threads": 1}
            client.authenticate(TOKEN, {"model": model, **numbers})
            clients.append(client)
        return Clients(clients, leads=rank == 0)

    def close(self) -> None:
        """Leave and end them."""
        self._stack.close()


def workers(count: int, worker: Callable[[int], Any]) -> list[Any]:
    """Run a function as each of several workers; return their values, or raise what one has raised."""
    outcomes = together(
        *(functools.partial(worker, rank) for rank in range(count)), seconds=SECONDS
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@pytest.fixture(autouse=True)
def clean(torch_state: None) -> None:
    """Use the guard in each test: a server sets threads."""


@pytest.fixture
def serve() -> Iterator[Callable[[int], Service]]:
    """Start servers, which end with the test."""
    services: list[Service] = []

    def start(count: int) -> Service:
        services.append(Service(count))
        return services[-1]

    yield start
    for service in services:
        service.close()
