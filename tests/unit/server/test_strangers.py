"""Who reaches a server's port without its token, or says what no worker says, disturbs nobody."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.errors import PeerError
from lockstep.exchange.base import Forest
from lockstep.exchange.frames import HEADER, Header, Kind, frame
from lockstep.exchange.links import Link, Links, greet
from lockstep.exchange.server import ServerExchange
from lockstep.server import serve as serving
from lockstep.server.connection import Connection
from lockstep.server.memory import Lease, Pool
from lockstep.server.serve import Server
from lockstep.world import servers
from tests.unit.server.conftest import SECONDS, TOKEN, Service

GREETING = {"room": "r", "rank": 0, "size": 1, "replicas": 1, "threads": 1}


def hello(text: bytes) -> bytes:
    return HEADER.pack(Kind.HELLO, 0, len(text), 0, 0, 0) + text


def greeting(guest: socket.socket, token: str = TOKEN, **more: Any) -> bytes:
    """Answer the server's challenge."""
    header = Header.unpack(guest.recv(HEADER.size, socket.MSG_WAITALL))
    nonce = json.loads(guest.recv(header.meta, socket.MSG_WAITALL))["nonce"]
    proofs = {"nonce": "n", "proof": servers.proof(token, "worker", (nonce, "n"))}
    # Python writes infinity as a word of its own; others write a number that is too large.
    text = json.dumps({**GREETING, **proofs, **more}).replace("Infinity", "1e999")
    return hello(text.encode())


def works(links: Links) -> bool:
    """Whether a worker still gets its sums."""
    exchange, values = ServerExchange(links, Forest.of(1, 1, 0)), torch.arange(100.0)
    return torch.equal(exchange.start([values.clone()], last=True).wait(), values)


def is_closed(guest: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while guest.recv(1 << 12):
            pass
    return True


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
        HEADER.pack(Kind.HELLO, 0, 1 << 20, 0, 0, 0),  # JSON longer than a greeting
        HEADER.pack(Kind.HELLO, 0, 2, 0, 0, 1 << 40) + b"{}",  # a terabyte to follow
        HEADER.pack(Kind.PUSH, 0, 0, 1, 0, 16) + bytes(16),  # no greeting
        hello(b"{]]"),
        hello(b"[]"),
        hello(b"\xff\xfe"),
        hello(b"[" * 4000),  # deeper than Python's stack
        hello(b'{"token": ' + b"[" * 900 + b"]" * 900 + b"}"),
        hello(b"9" * 4096),
        hello(json.dumps({**GREETING, "token": TOKEN}).encode()),
    ],
)
def test_strangers_are_shown_the_door(serve: Callable[[int], Service], words: bytes) -> None:
    service = serve(1)
    links = service.join(0, 1, 1)
    stranger = service.connect(0)
    stranger.sendall(words)
    assert is_closed(stranger)
    assert works(links)


@pytest.mark.parametrize(
    "says",
    [
        {"token": "x"},
        {"token": "x", "rank": float("inf")},
        {"proof": "\ud800"},  # half of a character: no UTF-8 has it
        {"proof": None},
        {"nonce": "\ud800"},
        {"nonce": "another"},
        {"rank": float("inf")},
        {"size": float("inf")},
        {"threads": 0},
        {"rank": "first"},
    ],
)
def test_greetings_that_prove_nothing_or_make_no_sense(
    serve: Callable[[int], Service], says: dict[str, Any]
) -> None:
    service = serve(1)
    links = service.join(0, 1, 1)
    stranger = service.connect(0)
    stranger.sendall(greeting(stranger, **says))
    assert is_closed(stranger)
    assert works(links)


def test_what_one_connection_has_proved_proves_nothing_on_another(
    serve: Callable[[int], Service],
) -> None:
    service = serve(1)
    links = service.join(0, 1, 1)
    first, second = service.connect(0), service.connect(0)
    heard = greeting(first)
    second.sendall(heard)
    assert is_closed(second)
    assert works(links)


def test_an_impostor_learns_no_secret_and_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(socket.create_connection(listener.getsockname(), timeout=SECONDS), 3)
        impostor, _ = listener.accept()
    for one in (
        frame(Kind.CHALLENGE, meta={"nonce": "n"}),
        frame(Kind.WELCOME, meta={"proof": "p"}),
    ):
        impostor.sendall(b"".join(one))
    with pytest.raises(PeerError, match="server 3 does not know the secret of this launch"):
        greet(link, TOKEN, GREETING)
    assert TOKEN.encode() not in impostor.recv(1 << 12)
    impostor.close()
    link.leave()


@pytest.mark.parametrize("size", [1 << 45, 1 << 62, (1 << 64) - 1])
def test_more_bytes_than_there_is_memory(serve: Callable[[int], Service], size: int) -> None:
    service = serve(1)
    links = service.join(0, 1, 1)
    guest = service.connect(0)
    guest.sendall(greeting(guest) + HEADER.pack(Kind.PUSH, 0, 0, 1, 0, size))
    welcome = Header.unpack(guest.recv(HEADER.size, socket.MSG_WAITALL))
    assert welcome.kind == Kind.WELCOME
    assert is_closed(guest)
    assert works(links)


def test_a_guest_who_says_nothing_keeps_nobody_waiting(serve: Callable[[int], Service]) -> None:
    service = serve(1)
    silent = service.connect(0)
    silent.sendall(HEADER.pack(Kind.HELLO, 0, 100, 0, 0, 0)[:5])
    assert works(service.join(0, 1, 1))


def test_guests_who_say_nothing_are_parted_with(
    serve: Callable[[int], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GREETING_SECONDS", 0.2)
    service = serve(1)
    links = service.join(0, 1, 1)
    silent = service.connect(0)
    silent.sendall(hello(b"{}")[:5])
    assert is_closed(silent)
    assert works(links), "a worker may be silent for as long as it computes"


def test_a_crowd_leaves_room_for_workers(
    serve: Callable[[int], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GREETING_SECONDS", 0.3)
    monkeypatch.setattr(serving, "GUESTS", 2)
    service = serve(1)
    crowd = [service.connect(0) for _ in range(5)]
    assert works(service.join(0, 1, 1)), "as soon as those before it have had their time"
    assert all(map(is_closed, crowd))


class Crowded(socket.socket):
    """A listener of a process that may have no more files, for the first few times."""

    refusals = 2

    def accept(self) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_server_without_room_for_one_more_file_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_PAUSE", 0.1)
    listener = Crowded()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = Server(listener, TOKEN)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        link = Link(socket.create_connection(listener.getsockname(), timeout=SECONDS), 0)
        greet(link, TOKEN, GREETING)
        link.leave()
    finally:
        server.end()
        thread.join(SECONDS)
    assert listener.refusals == 0


def test_memory_comes_back_from_workers_that_are_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    pool = Pool()
    connection, memory = Connection(here, pool), pool.take(1 << 26)
    connection.send(Kind.SUM, [memory], lease=Lease(pool, memory, 2))
    connection.send(Kind.SUM, [memory], lease=Lease(pool, memory, 1))
    assert connection.has_output, "more than fits on the way"
    there.close()
    connection.close()
    assert not connection.has_output
    assert pool.take(1 << 26) is memory


# --- a server that says what no server says -----------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (HEADER.pack(Kind.COUNT, 0, 0, 0, 0, 0), r"server 3 answered with kind 7; expected 4"),
        (HEADER.pack(Kind.SUM, 0, 0, 0, 0, 8) + bytes(8), "sends 8 bytes; expected 16"),
        (HEADER.pack(Kind.SUM, 0, 1 << 30, 0, 0, 0), "sends 1073741824 bytes of JSON"),
        (HEADER.pack(Kind.SUM, 0, 3, 0, 0, 0) + b"{]]", "sends JSON that is none"),
    ],
)
def test_answers_that_are_none(words: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(socket.create_connection(listener.getsockname()), 3)
        server, _ = listener.accept()
    server.sendall(words)
    with pytest.raises(PeerError, match=message) as refused:
        link.receive(Kind.SUM, [torch.zeros(4)])
    assert refused.value.hint
    server.close()
    link.leave()


@pytest.mark.parametrize("size", [1 << 62, (1 << 64) - 1])
def test_an_answer_without_end(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(socket.create_connection(listener.getsockname()), 3)
        server, _ = listener.accept()
    server.sendall(HEADER.pack(Kind.MEMORY, 0, 0, 0, 0, size))
    with pytest.raises(PeerError, match="for which there is no memory"):
        link.receive(Kind.MEMORY)
    server.close()
    link.leave()


def test_sums_that_come_in_another_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(socket.create_connection(listener.getsockname()), 3)
        server, _ = listener.accept()
    server.sendall(b"".join(frame(Kind.SUM, [torch.ones(4)], number=2)))
    exchange = ServerExchange(Links([link], leads=True), Forest.of(1, 1, 0))
    with pytest.raises(PeerError, match="sends the sum of bucket 2; expected bucket 1"):
        exchange.start([torch.ones(4)], last=True)
    server.close()
    exchange.close()
