"""Doors on the loopback interface, among services that are none."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UnreachableError, WorldError
from lockstep.world import port_discovery
from lockstep.world.port_discovery import Answer, PortDiscovery, knock
from tests.unit.threads import Party, together

HERE = ("127.0.0.1",)
_names = itertools.count()
#: No packet leaves for a multicast address by TCP: the system says so at once.
NO_WAY = "224.0.0.1"

Handler = Callable[[socket.socket], None]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that nobody else on this host uses."""
    return f"{request.node.nodeid}/{time.time_ns()}/{next(_names)}"


class Service:
    """Something that listens at a port, and is no door."""

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._handler(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._serving.join(5)
        self._listener.close()
        for connection in self._open:
            connection.close()


def silent(connection: socket.socket) -> None:
    """Say nothing, and keep the connection."""


def closing(connection: socket.socket) -> None:
    connection.close()


def resetting(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def dripping(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def echoing(connection: socket.socket) -> None:
    while data := connection.recv(4096):
        connection.sendall(data)


def saying(text: bytes) -> Handler:
    def handler(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(text)
        connection.close()

    return handler


FOREIGN: dict[str, Handler] = {
    "silent": silent,
    "closing": closing,
    "resetting": resetting,
    "dripping": dripping,
    "echoing": echoing,
    "ssh": lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n"),
    "http": saying(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "zeros": saying(b"\0" * 5000),
    "endless": saying(b"7" * 2_000_000),
    "list": saying(b"[1, 2]\n"),
    "nested": saying(b"[" * 5000),
    "nested-objects": saying(b'{"name":' * 400),
    "number": saying(b"1" * 899 + b"\n"),
    "utf-16": saying('{"name": 1}\n'.encode("utf-16")),
    "no-utf": saying(b"\xff\xfe\xfd\n"),
    "no-line": saying(b'{"port": 1'),
    "a-port": saying(b'{"port": 1}\n'),
    "null": saying(b'{"name": null, "port": 1, "refused": "go away"}\n'),
}


@pytest.fixture
def services() -> Iterator[Callable[..., Service]]:
    """Start services that are no doors."""
    started: list[Service] = []

    def start(handler: Handler, port: int = 0) -> Service:
        started.append(Service(handler, port))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what a guest waits for services that say nothing."""
    monkeypatch.setattr(port_discovery, "_HANDSHAKE_SECONDS", 0.25)
    monkeypatch.setattr(port_discovery, "_REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(port_discovery, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(port_discovery, "_UNREACHABLE_SECONDS", 0.15)


def serving(name: str, *, seconds: float = 5, **changes: Any) -> Party:
    asked = {"guests": ["rank 1"], **changes}
    host = PortDiscovery(name=name, store_port=4321, loopback=True, **asked)
    return Party(lambda: host.serve(seconds))


def knocking(name: str, guest: str = "rank 1", seconds: float = 5, **changes: Any) -> Answer:
    addresses = changes.pop("addresses", HERE)
    token = changes.pop("token", f"token of {guest}")
    return knock(addresses, name, guest, token=token, seconds=seconds, **changes)


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def an_answer(*, address: str = "127.0.0.1", port: int = 4321) -> Answer:
    return Answer(address=address, port=port)


# Sequences.


@given(name=st.text(max_size=300))
@settings(max_examples=50)
def test_a_sequence_follows_from_the_name_and_stays_in_its_range(name: str) -> None:
    ports = (
        port_discovery.sequence(name) if name.isprintable() else port_discovery.sequence(repr(name))
    )
    assert len(ports) == len(set(ports)) == 16
    assert all(18_000 <= port <= 31_999 for port in ports)
    if name.isprintable():
        assert ports == port_discovery.sequence(name)


def test_names_differ_in_where_their_sequences_go() -> None:
    # A stride of its own: two names that share a port don't share the following ones.
    firsts = {port_discovery.sequence(f"job {number}")[0] for number in range(200)}
    strides = {
        (ports[1] - ports[0]) % 14_000
        for ports in (port_discovery.sequence(f"job {number}") for number in range(200))
    }
    assert len(firsts) > 190
    assert len(strides) > 190


def test_a_name_of_bytes_that_are_no_text_has_a_sequence() -> None:
    assert len(port_discovery.sequence("job-\udcff")) == 16  # as the system gives it in an argument


# A host and its guests.


@pytest.mark.parametrize("handler", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_service_at_the_first_candidates(
    handler: Handler, name: str, services: Callable[..., Service], impatient: None
) -> None:
    for port in port_discovery.sequence(name)[:2]:
        services(handler, port)
    host = serving(name)
    assert knocking(name) == an_answer()
    assert host.end() is None


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"[" * 5000,
        b'{"name":' * 600,
        b"\xff" * 100,
        b"[]\n",
        b"{}\n",
        b'{"name": 1, "guest": 2, "token": 3}\n',
        b'{"name": "' + b"x" * 100_000 + b'"}\n',
    ],
    ids=lambda said: repr(said[:12]),
)
def test_a_visitor_that_speaks_otherwise_keeps_nobody_out(said: bytes, name: str) -> None:
    port = a_free_port()
    host = serving(name, port=port)
    with contextlib.closing(connected(port)) as visitor:
        with contextlib.suppress(OSError):  # the door may have shut it out before the last byte
            visitor.sendall(said)
            visitor.shutdown(socket.SHUT_WR)
        assert knocking(name, port=port) == an_answer()
    assert host.end() is None


def test_a_visitor_that_says_nothing_delays_a_guest_and_no_more(name: str, impatient: None) -> None:
    port = a_free_port()
    host = serving(name, port=port)
    with contextlib.closing(connected(port)), contextlib.closing(connected(port)):
        began = time.monotonic()
        assert knocking(name, port=port) == an_answer()
        assert time.monotonic() - began < 3
    assert host.end() is None


def test_a_visitor_that_drips_does_not_hold_the_door(
    name: str, impatient: None, services: Callable[..., Service]
) -> None:
    port = a_free_port()
    host = serving(name, port=port)
    with contextlib.closing(connected(port)) as visitor:
        threading.Thread(target=_drip_into, args=(visitor,), daemon=True).start()
        began = time.monotonic()
        assert knocking(name, port=port) == an_answer()
        assert time.monotonic() - began < 3
    assert host.end() is None


def _drip_into(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.05)


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_many_guests_at_once(name: str) -> None:
    guests = [f"rank {number}" for number in range(1, 9)]
    host = serving(name, guests=guests)
    found = together(*(lambda one=guest: knocking(name, one) for guest in guests))
    assert found == [an_answer()] * 8
    assert host.end() is None


def test_a_guest_may_come_before_its_host(name: str) -> None:
    guest = Party(lambda: knocking(name))
    time.sleep(0.1)
    assert serving(name).end() is None
    assert guest.end() == an_answer()


def test_a_name_longer_than_a_line(name: str) -> None:
    name += "x" * 5000
    host = serving(name)
    assert knocking(name) == an_answer()
    assert host.end() is None


def test_addresses_are_tried_all(name: str, impatient: None) -> None:
    host = serving(name)
    assert knocking(name, addresses=(NO_WAY, "127.0.0.1")) == an_answer()
    assert host.end() is None


def test_a_port_of_the_users(name: str) -> None:
    port = a_free_port()
    host = serving(name, port=port)
    assert knocking(name, port=port) == an_answer()
    assert host.end() is None


def test_no_guests_need_no_port(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PortDiscovery(name=name, store_port=1, guests=[]).serve(1) is None  # type: ignore[func-returns-value]


def test_the_same_guest_twice(name: str) -> None:
    host = serving(name, guests=["rank 1", "rank 2"])
    assert knocking(name, token="one") == an_answer()
    assert knocking(name, token="one") == an_answer()  # its answer may have been lost
    with pytest.raises(WorldError, match=r"rank 1 was turned away .* rank 1 has come before"):
        knocking(name, token="another")
    assert knocking(name, "rank 2") == an_answer()
    assert host.end() is None


def test_an_unexpected_guest(name: str) -> None:
    host = serving(name)
    began = time.monotonic()
    with pytest.raises(WorldError, match=r"rank 7 was turned away at .*: rank 7 is not expected"):
        knocking(name, "rank 7")
    assert time.monotonic() - began < 2, "waiting would not help"
    assert knocking(name) == an_answer()
    assert host.end() is None


def test_guests_that_nobody_numbered_may_call_themselves_the_same(name: str) -> None:
    # Two containers that share a network share the host's name, and each has a process 1.
    host = serving(name, guests=None, count=2)
    found = together(
        *(lambda one=token: knocking(name, "x, process 1", token=one) for token in "ab")
    )
    assert found == [an_answer()] * 2
    assert host.end() is None


# Who does not come.


def test_nobody_comes(name: str) -> None:
    failure = serving(name, guests=["rank 1", "rank 2"], seconds=0.2).end()
    assert isinstance(failure, WorldError)
    assert failure.message == "rank 1, rank 2 did not come within 0.2 s; came: nobody"
    assert failure.hint


def test_some_come(name: str) -> None:
    host = serving(name, guests=[f"rank {number}" for number in range(1, 12)], seconds=0.3)
    knocking(name, "rank 3")
    told = str(host.end())
    assert "rank 1, rank 2, rank 4, rank 5, rank 6, rank 7, rank 8, rank 9 and 2 more" in told
    assert "came: rank 3" in told


def test_some_of_those_without_numbers_come(name: str) -> None:
    host = serving(name, guests=None, count=3, seconds=0.5)
    knocking(name, "a node on b, process 7")
    assert "2 of 3 did not come within 0.5 s; came: a node on b, process 7" in str(host.end())


def test_no_port_is_free(name: str, services: Callable[..., Service]) -> None:
    taken = services(silent).port
    with pytest.raises(WorldError, match=f"no port is free for the ranks to meet at: {taken}"):
        PortDiscovery(name=name, store_port=1, guests=["rank 1"], loopback=True, port=taken).serve(
            1
        )


class Crowded(socket.socket):
    """A listener in a process that may open no more files for a moment."""

    left = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_too_many_open_files_are_waited_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = port_discovery.listen
    monkeypatch.setattr(
        port_discovery,
        "listen",
        lambda *args, **named: Crowded(fileno=open_(*args, **named).detach()),
    )
    host = serving(name)
    assert knocking(name) == an_answer()
    assert host.end() is None


def test_the_check_ends_the_host(name: str) -> None:
    def stop() -> None:
        raise InterruptedError

    host = PortDiscovery(name=name, store_port=1, guests=["rank 1"], loopback=True)
    with pytest.raises(InterruptedError):
        host.serve(5, stop)


def test_the_check_ends_the_guest(name: str) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        knocking(name, check=stop)


# An answer that is lost.


def test_a_guest_that_gave_up_before_its_answer_asks_again(name: str) -> None:
    # The host was busy: by the time it answers, the guest has closed the connection.
    port = a_free_port()
    host = serving(name, port=port)
    request = {"name": port_discovery._sign(name), "guest": "rank 1", "token": "one"}
    with contextlib.closing(connected(port)) as busy:
        time.sleep(0.1)
        with connected(port) as early:
            early.sendall(json.dumps(request).encode() + b"\n")
        busy.sendall(b"\n")
        assert knocking(name, token="one", port=port) == an_answer()
    assert host.end() is None


def test_a_guest_that_dies_in_the_handshake_has_not_come(name: str) -> None:
    port = a_free_port()
    host = serving(name, port=port, seconds=0.4)
    request = {"name": port_discovery._sign(name), "guest": "rank 1", "token": "one"}
    with connected(port) as early:
        early.sendall(json.dumps(request).encode() + b"\n")
        assert json.loads(early.recv(900))["welcome"] is True
    assert "rank 1 did not come" in str(host.end())


# A host that cannot be reached.


@pytest.mark.parametrize("ports", [None, 9], ids=["sequence", "one port"])
def test_no_packet_gets_there(ports: int | None, name: str, impatient: None) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"rank 1 cannot reach 224.0.0.1 on port") as caught:
        knocking(name, addresses=[NO_WAY], port=ports)
    assert time.monotonic() - began < 3
    assert "network is unreachable" in caught.value.message
    assert ("and others" in caught.value.message) == (ports is None)
    assert caught.value.hint


def test_packets_vanish(name: str, impatient: None) -> None:
    with (
        deaf() as port,
        pytest.raises(UnreachableError, match=r"from lo 127.0.0.1: timed out") as caught,
    ):
        knocking(name, port=port)
    assert f"on port {port}:" in caught.value.message


def test_a_host_without_an_address(name: str, impatient: None) -> None:
    with pytest.raises(UnreachableError, match="cannot reach a host without an address"):
        knocking(name, addresses=[])


def test_a_host_that_refuses_is_reached_and_waited_for(name: str, impatient: None) -> None:
    began = time.monotonic()
    with pytest.raises(
        WorldError, match=r"found nobody to meet at 127.0.0.1 within 0.4 s"
    ) as caught:
        knocking(name, seconds=0.4, port=a_free_port())
    assert not isinstance(caught.value, UnreachableError)
    assert time.monotonic() - began > 0.15


@pytest.mark.parametrize("handler", [silent, closing, resetting, dripping])
def test_a_host_with_a_foreign_service_is_reached(
    handler: Handler, name: str, services: Callable[..., Service], impatient: None
) -> None:
    port = services(handler).port
    with pytest.raises(WorldError, match="found nobody to meet") as caught:
        knocking(name, seconds=0.4, port=port)
    assert not isinstance(caught.value, UnreachableError)


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """Give a port at which packets vanish: the queue of who listens there is full."""
    with socket.socket() as listener, contextlib.ExitStack() as visitors:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            visitor = visitors.enter_context(socket.socket())
            visitor.setblocking(False)
            visitor.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


# Two jobs.


def test_sequences_that_overlap(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Both jobs have the same candidates: whoever comes second takes the next port.
    ports = port_discovery.sequence(name)
    monkeypatch.setattr(port_discovery, "sequence", lambda _: ports)
    hosts = [
        PortDiscovery(
            name=f"{name} {job}", store_port=job, guests=["rank 1", "rank 2"], loopback=True
        )
        for job in (1, 2)
    ]
    served = [Party(lambda one=host: one.serve(5)) for host in hosts]
    visits = [(job, rank) for job in (1, 2) for rank in (1, 2)]
    found = together(
        *(lambda j=job, r=rank: knocking(f"{name} {j}", f"rank {r}") for job, rank in visits)
    )
    assert found == [an_answer(port=job) for job, _ in visits]
    assert [one.end() for one in served] == [None, None]


def test_reversed_sequences(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ports = port_discovery.sequence(name)[:3]
    orders = {f"{name} 1": ports, f"{name} 2": ports[::-1]}
    monkeypatch.setattr(port_discovery, "sequence", lambda job: orders[job])
    check_pairs([f"{name} 1", f"{name} 2"])


def test_another_job_on_the_users_port(name: str) -> None:
    port = a_free_port()
    host = serving(f"{name} ours", port=port)
    with pytest.raises(WorldError, match="found nobody to meet"):
        knocking(f"{name} theirs", seconds=0.3, port=port)
    assert knocking(f"{name} ours", port=port) == an_answer()
    assert host.end() is None


def test_twenty_pairs_at_once(name: str) -> None:
    check_pairs([f"{name} {pair}" for pair in range(20)])


def test_twenty_pairs_on_few_ports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = port_discovery.sequence(name) + port_discovery.sequence(f"{name} more")
    monkeypatch.setattr(port_discovery, "sequence", lambda job: ports[hash(job) % 4 :])
    monkeypatch.setattr(port_discovery, "_HANDSHAKE_SECONDS", 5.0)
    check_pairs([f"{name} {pair}" for pair in range(20)])


def check_pairs(names: Sequence[str]) -> None:
    """Let hosts and guests of all names come at once: each guest hears of its own host's store."""

    def host(index: int) -> None:
        PortDiscovery(
            name=names[index], store_port=1000 + index, guests=["rank 1"], loopback=True
        ).serve(20)

    hosts = [lambda one=index: host(one) for index in range(len(names))]
    guests = [lambda one=name: knocking(one, seconds=20) for name in names]
    told = together(*guests, *hosts, seconds=25)
    assert told[: len(names)] == [an_answer(port=1000 + index) for index in range(len(names))]
    assert told[len(names) :] == [None] * len(names)


# Ports to wait for.


def test_awaiting_a_port(services: Callable[..., Service]) -> None:
    port = a_free_port()
    waiting = Party(lambda: port_discovery.await_port([NO_WAY, "127.0.0.1"], port, "rank 1", 5))
    time.sleep(0.1)
    services(silent, port)
    assert waiting.end() == "127.0.0.1"


def test_awaiting_a_port_in_vain() -> None:
    with pytest.raises(WorldError, match=r"rank 1 found nobody to meet at 127.0.0.1 within 0.2 s"):
        port_discovery.await_port(HERE, a_free_port(), "rank 1", 0.2)


def test_awaiting_a_port_where_no_packet_gets(impatient: None) -> None:
    with pytest.raises(UnreachableError, match=r"rank 1 cannot reach 224.0.0.1 on port 9: 224"):
        port_discovery.await_port([NO_WAY], 9, "rank 1", 5)
    with deaf() as port, pytest.raises(UnreachableError, match=r"127.0.0.1: timed out"):
        port_discovery.await_port(HERE, port, "rank 1", 5)


# Small things.


@pytest.mark.parametrize(
    ("address", "is_loopback", "listens_locally"),
    [
        ("localhost", True, True),
        ("127.0.0.1", True, True),
        ("127.0.1.1", True, False),
        ("::1", True, False),
        ("10.0.0.1", False, False),
        ("node1", False, False),
        ("127.example.org", False, False),
        ("", False, False),
        (None, False, False),
    ],
)
def test_loopback_addresses(address: str | None, is_loopback: bool, listens_locally: bool) -> None:
    assert port_discovery.is_loopback(address) == is_loopback
    assert port_discovery.listens_locally(address) == listens_locally


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.1.1", "127.0.0.2", "::1"])
def test_a_listener_is_found_at_its_address(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with port_discovery.listen(0, loopback=port_discovery.listens_locally(address)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection((address, port), timeout=2).close()
        with pytest.raises(OSError, match="in use"):
            port_discovery.listen(port, loopback=True)
        with pytest.raises(OSError, match="in use"):
            port_discovery.listen(port, loopback=False)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "timed out"),
        (OSError(113, "No route to host"), "no route to host"),
        (OSError("odd"), "odd"),
    ],
)
def test_reasons(error: OSError, words: str) -> None:
    assert port_discovery.reason(error) == words
