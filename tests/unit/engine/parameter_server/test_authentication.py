"""What reaches a server's port without the token, or says what no worker says, disturbs no worker."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lockstep.engine.exchange.base import Forest
from lockstep.engine.parameter_server import event_loop
from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.connection import Connection, Pool
from lockstep.engine.parameter_server.discovery import proof
from lockstep.engine.parameter_server.exchange import ServerExchange
from lockstep.engine.parameter_server.messages import HEADER, Header, Kind, pieces
from lockstep.errors import PeerError
from tests.unit.engine.parameter_server.conftest import SECONDS, TOKEN, Service

WORKER = {"model": "s", "rank": 0, "size": 1, "replicas": 1, "threads": 1}


def hello(text: bytes) -> bytes:
    return HEADER.pack(Kind.HELLO, 0, len(text), 0, 0, 0) + text


def answer(connection: socket.socket, token: str = TOKEN, **more: Any) -> bytes:
    """Answer the server's challenge."""
    header = Header.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
    nonce = json.loads(connection.recv(header.meta, socket.MSG_WAITALL))["nonce"]
    proofs = {"nonce": "n", "proof": proof(token, "worker", (nonce, "n"))}
    return hello(json.dumps({**WORKER, **proofs, **more}).encode())


def works(clients: Clients) -> bool:
    """Whether a worker still gets its sums."""
    exchange, values = ServerExchange(clients, Forest.of(1, 1, 0)), torch.arange(100.0)
    return torch.equal(exchange.start([values.clone()], last=True).wait(), values)


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 12):
            pass
    return True


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
        HEADER.pack(Kind.HELLO, 0, 1 << 20, 0, 0, 0),  # longer than what says who it is
        HEADER.pack(Kind.HELLO, 0, 2, 0, 0, 1 << 40) + b"{}",  # a terabyte to follow
        HEADER.pack(Kind.PUSH, 0, 0, 1, 0, 16) + bytes(16),
        hello(b"{]]"),
        hello(b"[]"),
        hello(b"\xff\xfe"),
        hello(b"[" * 4000),  # deeper than Python's stack
        hello(json.dumps({**WORKER, "token": TOKEN}).encode()),
        {"token": "x"},
        {"proof": "\ud800"},  # half of a character: no UTF-8 has it
        {"proof": None},
        {"nonce": "\ud800"},
        {"nonce": "another"},
    ],
)
def test_a_connection_without_the_token(
    serve: Callable[[int], Service], words: bytes | dict[str, Any]
) -> None:
    service = serve(1)
    silent, connection = service.connect(0), service.connect(0)
    connection.sendall(words if isinstance(words, bytes) else answer(connection, **words))
    assert is_closed(connection)
    assert works(service.join(0, 1, 1))
    silent.sendall(hello(b"{}")[:5])
    assert works(service.join(0, 1, 1, "another"))


def test_a_crowd_without_the_token_leaves_room_for_workers(
    serve: Callable[[int], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "_MOST_UNKNOWN", 2)
    service = serve(1)
    crowd = [service.connect(0) for _ in range(3)]
    waits = [service.connect(0) for _ in range(2)]
    for one in crowd:
        one.close()
    assert all(one.recv(1) for one in waits), "none of them is closed for another"
    for one in waits:
        one.close()
    assert works(service.join(0, 1, 1))


def test_connections_that_do_not_show_the_token_in_time(
    serve: Callable[[int], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "_MOST_UNKNOWN", 2)
    service = serve(1)
    with monkeypatch.context() as patch:
        patch.setattr(event_loop, "_GREETING_SECONDS", 0.2)
        crowd = [service.connect(0) for _ in range(5)]
        for one in crowd:
            one.sendall(hello(b"{}")[:5])
        assert all(map(is_closed, crowd))
    assert works(service.join(0, 1, 1))


def test_no_descriptor_is_left_for_a_connection(serve: Callable[[int], Service]) -> None:
    service, soft_hard = serve(1), resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as connection:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, soft_hard[1]))
        try:
            connection.connect(("127.0.0.1", service.ports[0]))
            deadline = time.monotonic() + SECONDS
            while service.servers[0]._accepts:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
        assert works(service.join(0, 1, 1))


def test_a_worker_sends_for_one_turn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engine.parameter_server.connection._TURN", HEADER.size)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    connection, seen = Connection(here, Pool()), list[int]()
    connection.rank = 0
    there.sendall(b"".join(HEADER.pack(Kind.PUSH, 0, 0, n, 0, 0) for n in range(3)))
    here.recv(3 * HEADER.size, socket.MSG_PEEK)
    for turn in range(3):
        connection.read(lambda _, message: seen.append(message.header.number))
        assert seen == list(range(turn + 1))
    there.close()
    connection.close()


def test_what_one_connection_has_proved_proves_nothing_on_another(
    serve: Callable[[int], Service],
) -> None:
    service = serve(1)
    first, second = service.connect(0), service.connect(0)
    second.sendall(answer(first))
    assert is_closed(second)
    assert works(service.join(0, 1, 1))


def test_more_bytes_than_there_is_memory(serve: Callable[[int], Service]) -> None:
    service = serve(1)
    connection = service.connect(0)
    connection.sendall(answer(connection) + HEADER.pack(Kind.PUSH, 0, 0, 1, 0, 1 << 62))
    assert is_closed(connection)
    assert works(service.join(0, 1, 1, "another"))


def test_memory_comes_back_from_workers_that_are_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    pool = Pool()
    connection, memory = Connection(here, pool), pool.take(1 << 26)
    release = pool.shared(memory, 2)
    for _ in range(2):
        connection.send(Kind.SUM, [memory], release=release)
    assert connection.has_output, "more than fits on the way"
    there.close()
    connection.close()
    assert not connection.has_output
    assert pool.take(1 << 26) is memory


# --- what is no server -------------------------------------------------------------------------------


@pytest.fixture
def impostor() -> Iterator[tuple[Client, socket.socket]]:
    """A client, and what has taken the server's place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(socket.create_connection(listener.getsockname(), timeout=SECONDS), 3)
        server, _ = listener.accept()
    yield client, server
    server.close()
    client.close()


def test_an_impostor_learns_no_secret_and_is_found_out(
    impostor: tuple[Client, socket.socket],
) -> None:
    client, server = impostor
    for kind, meta in ((Kind.CHALLENGE, {"nonce": "n"}), (Kind.WELCOME, {"proof": "p"})):
        server.sendall(b"".join(pieces(kind, meta=meta)))
    with pytest.raises(PeerError, match="server 3 does not know the secret of this launch"):
        client.authenticate(TOKEN, WORKER)
    assert TOKEN.encode() not in server.recv(1 << 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (HEADER.pack(Kind.TRAFFIC, 0, 0, 0, 0, 0), r"server 3 answers with kind 10; expected 5"),
        (HEADER.pack(Kind.SUM, 0, 0, 0, 0, 8) + bytes(8), "sends 8 bytes; expected 16"),
        (HEADER.pack(Kind.SUM, 0, 3, 0, 0, 0) + b"{]]", "sends JSON that is none"),
        (b"".join(pieces(Kind.SUM, [torch.ones(4)], number=2)), "of bucket 2; expected bucket 1"),
    ],
)
def test_answers_that_no_server_gives(
    impostor: tuple[Client, socket.socket], words: bytes, message: str
) -> None:
    client, server = impostor
    server.sendall(words)
    exchange = ServerExchange(Clients([client], leads=True), Forest.of(1, 1, 0))
    with pytest.raises(PeerError, match=message) as refused:
        exchange.start([torch.ones(4)], last=True)
    assert refused.value.hint


def test_why_a_server_takes_nothing_more(impostor: tuple[Client, socket.socket]) -> None:
    client, server = impostor
    client.expect(0, lambda: torch.empty(4))
    server.sendall(b"".join(pieces(Kind.VERSION, [torch.ones(4)])))
    server.sendall(b"".join(pieces(Kind.ERROR, meta={"message": "rank 1 has left", "hint": None})))
    server.close()

    def send() -> None:
        for _ in range(1000):
            client.send(Kind.PUSH, [torch.ones(1 << 16)])

    with pytest.raises(PeerError, match="rank 1 has left"):
        send()
