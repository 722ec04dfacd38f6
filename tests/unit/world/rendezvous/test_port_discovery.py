"""The port of a job's store, on the loopback interface, among services that answer otherwise."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UnreachableError, WorldError
from lockstep.world.rendezvous import port_discovery
from lockstep.world.rendezvous.port_discovery import (
    Announcer,
    SocketAddress,
    announce,
    await_port,
    find,
)
from tests.unit.threads import Party, together

HERE = ("127.0.0.1",)
FOUND = ("127.0.0.1", 4321)
_names = itertools.count()
#: No packet leaves for a multicast address by TCP: the system says so at once.
NO_WAY = "224.0.0.1"
#: What services that are none of ours say first; `None` for nothing.
FOREIGN: dict[str, bytes | None] = {
    "silent": None,
    "closing": b"",
    "ssh": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "zeros": b"\0" * 5000,
    "endless": b"7" * 2_000_000,
    "list": b"[1, 2]\n",
    "nested": b"[" * 5000,
    "utf-16": '{"name": 1}\n'.encode("utf-16"),
    "no utf": b"\xff\xfe\xfd\n",
    "no line": b'{"port": 1',
    "a port": b'{"port": 1}\n',
    "null": b'{"name": null, "port": 1}\n',
}


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other job on this host uses."""
    return f"{request.node.nodeid}/{time.time_ns()}/{next(_names)}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_discovery, "_CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(port_discovery, "_UNREACHABLE_SECONDS", 0.15)


@contextlib.contextmanager
def foreign(said: bytes | None, port: int = 0) -> Iterator[int]:
    """Give the port of a service that says something to each connection."""
    with socket.create_server(("127.0.0.1", port)) as listener, contextlib.ExitStack() as open_:
        serving = Party(lambda: _say(listener, said, open_))
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        serving.end()


def _say(listener: socket.socket, said: bytes | None, open_: contextlib.ExitStack) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection = open_.enter_context(listener.accept()[0])
            connection.settimeout(1)
            if said is not None:
                with contextlib.suppress(OSError):
                    connection.sendall(said)
                connection.close()


def look_for(name: str, seconds: float = 5, **changes: Any) -> SocketAddress:
    return find(changes.pop("addresses", HERE), name, "rank 1", seconds=seconds, **changes)


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@given(name=st.text(max_size=300))
@settings(max_examples=50)
def test_a_sequence_follows_from_the_name_and_stays_in_its_range(name: str) -> None:
    ports = port_discovery.sequence(name.encode(errors="replace").decode())
    assert ports == port_discovery.sequence(name.encode(errors="replace").decode())
    assert len(set(ports)) == 16
    assert all(18_000 <= port <= 31_999 for port in ports)


def test_names_differ_in_where_their_sequences_go() -> None:
    # A stride of its own: two names that share a port don't share the following ones.
    found = [port_discovery.sequence(f"job {number}") for number in range(200)]
    assert len({ports[0] for ports in found}) > 190
    assert len({(ports[1] - ports[0]) % 14_000 for ports in found}) > 190
    assert port_discovery.sequence("job-\udcff"), "bytes that are no text, as in an argument"


@pytest.mark.parametrize("said", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_services_at_the_first_candidates(
    said: bytes | None, name: str, impatient: None
) -> None:
    first, second, *_ = port_discovery.sequence(name)
    with foreign(said, first), foreign(said, second), announce(name, 4321, loopback=True):
        assert look_for(name) == FOUND


def test_a_host_with_a_foreign_service_is_reached(name: str, impatient: None) -> None:
    with (
        foreign(FOREIGN["list"]) as port,
        pytest.raises(WorldError, match="found no rendezvous") as caught,
    ):
        look_for(name, 0.4, port=port)
    assert not isinstance(caught.value, UnreachableError)


@pytest.mark.parametrize("said", [None, b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000])
def test_strangers_keep_no_member_out(said: bytes | None, name: str) -> None:
    port = a_free_port()
    with contextlib.ExitStack() as strangers, announce(name, 4321, loopback=True, port=port):
        for _ in range(20):
            one = strangers.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            with contextlib.suppress(OSError):  # it may be closed before the last byte
                one.sendall(said or b"")
        assert look_for(name, port=port) == FOUND


def test_one_that_asks_before_the_host_is_there(name: str) -> None:
    early = Party(lambda: look_for(name, addresses=(NO_WAY, "127.0.0.1")))
    time.sleep(0.1)
    with announce(name, 4321, loopback=True):
        assert early.end() == FOUND


def test_a_closed_announcer_leaves_its_port(name: str) -> None:
    port = a_free_port()
    for number in (1, 2):
        with announce(name, number, loopback=True, port=port):
            assert look_for(name, port=port) == ("127.0.0.1", number)
    with pytest.raises(WorldError, match="found no rendezvous"):
        look_for(name, 0.1, port=port)


def test_no_port_is_free(name: str) -> None:
    with (
        foreign(None) as taken,
        pytest.raises(WorldError, match=f"no port is free for the rendezvous: {taken}"),
    ):
        announce(name, 1, loopback=True, port=taken)


class Crowded(socket.socket):
    """A listener in a process that may open no more files for a moment."""

    left = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_too_many_open_files_are_waited_out() -> None:
    listener = Crowded(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    port = listener.getsockname()[1]
    with Announcer(listener, {"name": port_discovery._hash("x"), "port": 4321}):
        assert look_for("x", port=port) == FOUND


def test_the_check_ends_a_search(name: str) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        look_for(name, check=stop)


# A host that cannot be reached.


@pytest.mark.parametrize("ports", [None, 9], ids=["sequence", "one port"])
def test_no_packet_gets_there(ports: int | None, name: str, impatient: None) -> None:
    with pytest.raises(UnreachableError, match=r"rank 1 cannot reach 224.0.0.1 on port") as caught:
        look_for(name, addresses=[NO_WAY], port=ports)
    assert "network is unreachable" in caught.value.message
    assert ("and others" in caught.value.message) == (ports is None)
    with pytest.raises(UnreachableError, match="cannot reach a host without an address"):
        look_for(name, addresses=[])


def test_packets_vanish(name: str, impatient: None) -> None:
    with deaf() as port:
        for search in (
            lambda: look_for(name, port=port),
            lambda: await_port(HERE, port, "rank 1", 5),
        ):
            with pytest.raises(UnreachableError, match=rf"on port {port}:.* lo 127.0.0.1: timed"):
                search()


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


def test_a_host_that_refuses_is_reached_and_waited_for(name: str, impatient: None) -> None:
    port = a_free_port()
    for search in (
        lambda: look_for(name, 0.4, port=port),
        lambda: await_port(HERE, port, "rank 1", 0.4),
    ):
        with pytest.raises(
            WorldError, match=r"rank 1 found no rendezvous at .* within 0.4 s"
        ) as no:
            search()
        assert not isinstance(no.value, UnreachableError)


def test_awaiting_a_port() -> None:
    port = a_free_port()
    waiting = Party(lambda: await_port([NO_WAY, "127.0.0.1"], port, "rank 1", 5))
    time.sleep(0.1)
    with foreign(None, port):
        assert waiting.end() == "127.0.0.1"


# Several jobs.


def check_pairs(names: list[str]) -> None:
    """Let hosts and others of all names come at once: each hears of its own host's store."""
    release = threading.Event()

    def host(index: int) -> None:
        with announce(names[index], 1000 + index, loopback=True):
            release.wait(30)

    hosts = [Party(lambda one=index: host(one)) for index in range(len(names))]
    found = together(*(lambda one=name: look_for(one, 20) for name in names), seconds=25)
    release.set()
    assert found == [("127.0.0.1", 1000 + index) for index in range(len(names))]
    assert [one.end() for one in hosts] == [None] * len(names)


def _reversed(name: str) -> Callable[[str], tuple[int, ...]]:
    ports = port_discovery.sequence(name)[:3]
    return lambda job: ports if job.endswith("0") else ports[::-1]


def _few(name: str) -> Callable[[str], tuple[int, ...]]:
    ports = port_discovery.sequence(name) + port_discovery.sequence(f"{name} more")
    return lambda job: ports[hash(job) % 4 :]


@pytest.mark.parametrize(
    ("sequences", "count"),
    [(None, 20), (_reversed, 2), (_few, 20)],
    ids=["own", "reversed", "overlapping"],
)
def test_jobs_side_by_side(
    sequences: Callable[[str], Callable[[str], tuple[int, ...]]] | None,
    count: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sequences is not None:
        monkeypatch.setattr(port_discovery, "sequence", sequences(name))
    check_pairs([f"{name} {number}" for number in range(count)])
