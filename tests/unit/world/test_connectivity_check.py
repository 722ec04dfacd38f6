"""The survey with threads as members, on the loopback interface."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import LockstepError, UnreachableError, UsageError, WorldError
from lockstep.world import connectivity_check as surveying
from lockstep.world.connectivity_check import Reach, partners, survey
from lockstep.world.network import Interface
from lockstep.world.probe import Prober, Target
from tests.unit.threads import Party


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "_PATIENCE", 1.0)
    monkeypatch.setattr(surveying, "_SLACK", 0.4)


@pytest.fixture
def prober() -> Iterator[Prober]:
    with Prober() as one:
        yield one


def labels_of(count: int) -> list[str]:
    return [f"node {number} (host{number})" for number in range(count)]


def take_part(
    store: dist.Store, index: int, count: int, interface: str | None = "lo"
) -> tuple[Reach, ...] | LockstepError:
    try:
        return survey(store, index=index, labels=labels_of(count), interface=interface)
    except LockstepError as error:
        return error


def together(count: int, *, without: Sequence[int] = (), store: dist.Store | None = None) -> Any:
    """Survey with threads as members; return what each found."""
    shared = store or dist.HashStore()
    members = [number for number in range(count) if number not in without]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda index: take_part(shared, index, count), members))


def the_error(told: list[Any]) -> str:
    assert all(isinstance(one, UnreachableError) for one in told), told
    assert len({one.message for one in told}) == 1, "the same text on every member"
    assert "--interface" in told[0].hint
    return str(told[0].message)


def test_a_host_without_open_files_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_prober: Prober) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Prober, "_live", fail)
    error = Party(Prober().__enter__).end()
    assert isinstance(error, WorldError), "it waits for a listener that never opens"
    assert "too many open files" in error.message
    assert "ulimit" in str(error.hint)


def test_all_find_the_same() -> None:
    assert together(3) == [(Reach("lo", "127.0.0.1"),) * 3] * 3


def test_a_member_may_be_slow_to_come() -> None:
    store = dist.HashStore()
    first = Party(lambda: take_part(store, 0, 2))
    assert isinstance(first.end(6), TimeoutError), "joining has 300 s, and the survey 4"
    found = take_part(store, 1, 2)
    assert found == (Reach("lo", "127.0.0.1"),) * 2
    assert first.end() == found


def test_alone() -> None:
    (found,) = together(1)
    assert len(found) == 1


def test_without_a_wish_the_members_of_one_host_agree() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda index: take_part(store, index, 2, None), range(2)))
    assert told[0] == told[1]
    assert isinstance(told[0], tuple)


def test_more_members_than_all_pairs_are_tried_of() -> None:
    count = 70
    assert together(count) == [(Reach("lo", "127.0.0.1"),) * count] * count


def test_partners() -> None:
    assert partners(1, 3) == [0, 2]
    assert len(partners(5, 64)) == 63
    assert partners(3, 65) == [0, 2, 4, 5, 7, 11, 19, 35]
    assert partners(0, 1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert all(len(partners(index, 1000)) <= 11 for index in range(1000))


def test_through_a_real_store() -> None:
    """Each member has a connection of its own: clients of a store wait for each other."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(index: int) -> Any:
        mine = dist.TCPStore("127.0.0.1", master.port, is_master=False)
        return take_part(dist.PrefixStore("survey", mine), index, 2)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(client, range(2)))
    assert told == [(Reach("lo", "127.0.0.1"),) * 2] * 2


@pytest.mark.usefixtures("impatient")
def test_a_member_that_does_not_come() -> None:
    began = time.monotonic()
    error = the_error(together(3, without=[1]))
    assert error.startswith("node 1 (host1) met the others, but did not come to try the network")
    assert time.monotonic() - began < 3


@pytest.mark.usefixtures("impatient")
def test_the_first_member_does_not_come() -> None:
    assert the_error(together(3, without=[0])).startswith("node 0 (host0) left, or did not come")


@pytest.mark.usefixtures("impatient")
def test_a_member_that_leaves_in_the_middle(prober: Prober) -> None:
    store = dist.HashStore()
    store.set("card/1", card(prober.token, prober.port))
    error = the_error(together(3, without=[1], store=store))
    assert error == "node 1 (host1) left while the network was tried"


def card(token: str, port: int) -> str:
    return json.dumps({"token": token, "port": port, "offers": [["lo", "127.0.0.1", True]]})


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fake_member(store: dist.Store, token: str, port: int) -> threading.Thread:
    """Member 1, which reaches member 0, but has another listener than it says."""
    store.set("card/1", card(token, port))
    for number in range(2):
        store.set(f"report/{number}/1", json.dumps([[0, 0, "lo 127.0.0.1", ""]]))
    return threading.Thread()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_port_that_refuses(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = () if elsewhere else (Interface("lo", "127.0.0.1", loopback=True),)
    monkeypatch.setattr(surveying, "interfaces", lambda: own)
    store, port = dist.HashStore(), closed_port()
    fake_member(store, "token", port)
    error = the_error([take_part(store, 0, 2)])
    assert "node 0 (host0) cannot reach node 1 (host1), though node 1 (host1) reaches" in error
    why = "connection refused" if elsewhere else "node 0 (host0) has that address itself"
    assert error.endswith(f"to lo 127.0.0.1 port {port}: {why}")


@pytest.mark.usefixtures("impatient")
def test_another_launch_answers(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "interfaces", tuple)
    store = dist.HashStore()
    fake_member(store, "not its token", prober.port)
    assert the_error([take_part(store, 0, 2)]).endswith("answered by another launch")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answered by something else than Lockstep"),
        (b"x" * 100_000, "answered by something else than Lockstep"),
        (b"[" * 200 + b"\n", "answered by something else than Lockstep"),
        (b"", "timed out"),
    ],
)
def test_something_else_answers(words: bytes, why: str, prober: Prober) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answering = threading.Thread(target=answer, args=(server, words))
        answering.start()
        (outcome,) = prober.probe([Target("127.0.0.1", port)], 0.3)
        answering.join()
    assert outcome.failure == why
    assert outcome.token is None


def answer(server: socket.socket, words: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(words)
        connection.recv(100)
        connection.settimeout(1)
        if not words:
            connection.recv(100)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"\n"])
def test_strangers_learn_nothing(words: bytes, prober: Prober) -> None:
    with socket.create_connection(("127.0.0.1", prober.port), timeout=5) as stranger:
        try:
            stranger.sendall(words)
            assert stranger.recv(1000) == b""
        except ConnectionError:
            pass
    (outcome,) = prober.probe([Target("127.0.0.1", prober.port)], 1)
    assert outcome.token == prober.token, "it still answers"


def test_silent_visitors_do_not_keep_it_open() -> None:
    with Prober() as prober:
        silent = [socket.create_connection(("127.0.0.1", prober.port)) for _ in range(20)]
        assert prober.probe([Target("127.0.0.1", prober.port)], 1)[0].token == prober.token
    for one in silent:
        one.close()


def test_more_targets_than_at_once(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.world.probe._AT_ONCE", 1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = Target("127.0.0.1", mute.getsockname()[1])
        told = prober.probe([silent, Target("127.0.0.1", prober.port)], 0.3)
    assert [one.failure for one in told] == ["timed out", "not tried within 0.3 s"]


def test_a_wrong_interface_is_told_to_all() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        wrong = pool.submit(take_part, store, 1, 2, "eth77")
        other = pool.submit(take_part, store, 0, 2)
    assert isinstance(wrong.result(), UsageError)
    error = the_error([other.result()])
    assert error.startswith("node 1 (host1): the interface 'eth77' does not exist")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '"card"', "7", '{"port": 3}', "x" * (1 << 22 | 1)]
)
def test_a_card_that_cannot_be_read(text: str) -> None:
    store = dist.HashStore()
    store.set("card/1", text)
    assert "node 1 (host1): " in the_error(together(3, without=[1], store=store))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", ["{", "7", "[[0, 99, 3, 4]]", '{"error": 3}'])
def test_a_report_that_cannot_be_read(text: str, prober: Prober) -> None:
    store = dist.HashStore()
    store.set("card/1", card(prober.token, prober.port))
    store.set("report/0/1", text)
    assert "cannot be read" in the_error(together(3, without=[1], store=store))


def test_a_store_that_goes_away() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine = dist.TCPStore("127.0.0.1", master.port, is_master=False)
    del master
    told = take_part(mine, 0, 2)
    assert isinstance(told, UnreachableError)
    assert "node 0 (host0) lost the store at which the nodes meet" in told.message
