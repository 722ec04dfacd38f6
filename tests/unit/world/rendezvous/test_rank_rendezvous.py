"""Ranks that are threads meet, in every way that a world may name."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import PeerError, UsageError, WorldError
from lockstep.world import World
from lockstep.world.rendezvous import members, rank_rendezvous, store
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from tests.unit.threads import Party, together

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every thread be a process that makes its first run; leave the environment as it was."""
    monkeypatch.setattr(rank_rendezvous, "_runs", itertools.repeat(0))
    for name in (*INTERFACES, "LOCKSTEP_INTERFACE", "LOCKSTEP_LAUNCHER"):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setenv("LOCKSTEP_JOIN_TIMEOUT", "20")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_JOIN_TIMEOUT", "0.3")
    monkeypatch.setattr(members, "_SLACK", 0.2)
    monkeypatch.setattr(members, "_LINGER_SECONDS", 0.2)
    monkeypatch.setattr(store, "_STORE_TIMEOUT", timedelta(seconds=0.1))


def worlds(size: int = 2, **settings: Any) -> list[World]:
    """Return the worlds of ranks that don't know who shares their node."""
    settings = {"placed": False, "environment": "torchrun", **settings}
    return [
        World(rank=rank, size=size, local_rank=rank, local_size=size, **settings)
        for rank in range(size)
    ]


def join_all(ranks: list[World], store: dist.Store | None = None) -> list[Any]:
    return together(
        *(lambda one=world: rank_rendezvous.join_ranks(one, store) for world in ranks), seconds=25
    )


def check_met(found: list[Any]) -> None:
    """Let ranks that have met exchange a word, and leave."""
    assert all(isinstance(one, RankRendezvous) for one in found), found
    for rank, one in enumerate(found):
        assert (one.world.rank, one.world.placed, one.number) == (rank, True, 0)
        one.store.set(f"word/{rank}", f"of {rank}")
    for one in found:
        words = [one.store.get(f"word/{rank}").decode() for rank in range(len(found))]
        assert words == [f"of {rank}" for rank in range(len(found))]
    assert together(*(lambda one=one: rank_rendezvous.leave(one) for one in found)) == [None] * len(
        found
    )


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# Ways to meet.


def test_one_rank_needs_no_network() -> None:
    found = rank_rendezvous.join_ranks(World())
    assert isinstance(found.store, dist.HashStore)
    rank_rendezvous.leave(found)


def test_a_store_of_the_scripts_own() -> None:
    store = dist.HashStore()
    found = join_all(worlds(file="(a store of the script's own)"), store)
    assert not any(one.ours for one in found)
    check_met(found)


def test_a_file(tmp_path: Path) -> None:
    check_met(join_all(worlds(3, file=str(tmp_path / "rendezvous"))))
    assert list(tmp_path.iterdir()) == [], "no file is left"


def test_the_second_run_meets_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_rendezvous, "_runs", itertools.repeat(1))
    found = join_all(worlds(file=str(tmp_path / "rendezvous")))
    assert [path.name for path in tmp_path.iterdir()] == ["rendezvous.1"]
    together(*(lambda one=one: rank_rendezvous.leave(one) for one in found))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_a_port(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    check_met(join_all(worlds(address=address, port=a_free_port())))


def test_a_key(request: pytest.FixtureRequest) -> None:
    key = f"{request.node.nodeid}/{time.time_ns()}"
    check_met(join_all(worlds(4, address="127.0.0.2", key=key)))


def test_a_store_that_the_launcher_hosts() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    check_met(join_all(worlds(address="127.0.0.1", port=host.port, agent_store=True)))


def test_what_lockstep_run_started_has_been_called_before() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"address": "127.0.0.1", "port": host.port, "agent_store": True}
    ranks = worlds(placed=True, environment="lockstep", **place)
    found = rank_rendezvous.join_ranks(ranks[1])  # nobody else is waited for
    assert found.world == ranks[1]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_generations_don_t_read_each_others_notes() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"address": "127.0.0.1", "port": host.port, "agent_store": True}
    for generation in (0, 1):
        found = join_all(worlds(generation=generation, **place))
        assert not found[0].store.check(["note"])
        found[0].store.set("note", "1")


def test_ranks_find_out_that_they_share_a_host(tmp_path: Path) -> None:
    found = join_all(worlds(3, file=str(tmp_path / "rendezvous")))
    assert [(one.world.local_rank, one.world.local_size) for one in found] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_users_own_interface_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    check_met(join_all(worlds(file=str(tmp_path / "rendezvous"))))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


# Several nodes, on one host.


# What goes wrong.


def test_a_rank_that_does_not_come_by_name(request: pytest.FixtureRequest, impatient: None) -> None:
    ranks = worlds(3, address="127.0.0.1", key=f"{request.node.nodeid}/{time.time_ns()}")
    found = join_all(ranks[:2])
    assert all(isinstance(one, WorldError) for one in found), found
    assert {one.message for one in found} == {"1 of 3 ranks did not come within 0.3 s: rank 2"}


def test_a_rank_that_does_not_come_to_the_file(tmp_path: Path, impatient: None) -> None:
    found = join_all(worlds(3, file=str(tmp_path / "rendezvous"))[::2])
    assert all(isinstance(one, WorldError) for one in found), found
    assert {one.message for one in found} == {"1 of 3 ranks did not come within 0.3 s: rank 1"}
    assert list(tmp_path.iterdir()) == [], "the next launch is not told of a stale file"


def test_a_stale_file_is_named_and_kept(tmp_path: Path, impatient: None) -> None:
    ranks = worlds(file=str(tmp_path / "rendezvous"))
    assert all(
        isinstance(one, RankRendezvous) for one in join_all(ranks)
    )  # and die without leaving
    found = join_all(ranks)
    assert all(isinstance(one, WorldError) for one in found), found
    assert all("has come twice" in one.message for one in found)
    assert "stale file" in found[0].hint
    assert (tmp_path / "rendezvous").exists()


def test_a_stale_file_is_no_trap_for_what_lockstep_run_started(
    tmp_path: Path, impatient: None
) -> None:
    ranks = worlds(placed=True, environment="lockstep", file=str(tmp_path / "rendezvous"))
    assert all(isinstance(one, RankRendezvous) for one in join_all(ranks))
    assert all("has come twice" in str(one) for one in join_all(ranks))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere/rendezvous", "the directory of the rendezvous file .* does not exist"),
        ("directory", "cannot be opened: is a directory"),
        ("text", "is there, and is no rendezvous file"),
        ("text/rendezvous", "the directory of the rendezvous file .* does not exist"),
    ],
)
def test_files_in_which_nobody_can_meet(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "text").write_text("loss,accuracy\n1.0,0.5\n")
    with pytest.raises(WorldError, match=said):
        rank_rendezvous.join_ranks(worlds(file=str(tmp_path / path))[0])
    assert (tmp_path / "text").read_text() == "loss,accuracy\n1.0,0.5\n"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(WorldError, match=f"port {port} on 127.0.0.1 is taken"):
            rank_rendezvous.join_ranks(worlds(address="127.0.0.1", port=port)[0])


def test_a_port_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int, *, loopback: bool) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "listen", refuse)
    with pytest.raises(WorldError, match="port 80 cannot be opened: permission denied"):
        rank_rendezvous.join_ranks(worlds(address="127.0.0.1", port=80)[0])


@pytest.mark.parametrize("talks", [False, True])
def test_another_program_at_the_port(talks: bool, impatient: None) -> None:
    with foreign(b"SSH-2.0-OpenSSH_9.2p1\r\n" * 10 if talks else b"") as port:
        began = time.monotonic()
        with pytest.raises(WorldError, match=f"listens at 127.0.0.1 on port {port} is no store"):
            rank_rendezvous.join_ranks(worlds(address="127.0.0.1", port=port)[1])
        assert time.monotonic() - began < 5


@contextlib.contextmanager
def foreign(said: bytes) -> Iterator[int]:
    """Give the port of a program that is no store: it says something, or only listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = Party(lambda: _say(listener, said))
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        serving.end()


def _say(listener: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as connections:
        while True:
            connection = connections.enter_context(listener.accept()[0])
            connection.sendall(said)


# Patience.


def test_how_long_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_JOIN_TIMEOUT")
    assert rank_rendezvous.join_timeout() == timedelta(seconds=300)
    monkeypatch.setenv("LOCKSTEP_JOIN_TIMEOUT", "1.5")
    assert rank_rendezvous.join_timeout() == timedelta(seconds=1.5)


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "nan", "inf", "1e300"])
def test_a_patience_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_JOIN_TIMEOUT", text)
    with pytest.raises(UsageError, match="expected a positive number of seconds"):
        rank_rendezvous.join_timeout()


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({}, None),
        ({"LOCKSTEP_INTERFACE": "eth1"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth2"}, "eth2"),
        ({"LOCKSTEP_INTERFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth2"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth2,eth3"}, None),
        ({"GLOO_SOCKET_IFNAME": ""}, None),
        ({"LOCKSTEP_INTERFACE": ""}, None),
        ({"GLOO_SOCKET_IFNAME": "eth2", "LOCKSTEP_LAUNCHER": "0.1"}, None),
    ],
)
def test_the_interface_that_the_user_chose(
    environ: dict[str, str], interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert rank_rendezvous.chosen_interface() == interface


# After the rendezvous.


@pytest.fixture
def pair() -> Callable[[], list[RankRendezvous]]:
    """Make the meetings of two ranks."""

    def make(**settings: Any) -> list[RankRendezvous]:
        store = dist.HashStore()
        ranks = worlds(file="(none)", **settings)
        return [RankRendezvous(world=one, store=store, number=0, ours=True) for one in ranks]

    return make


def test_ranks_are_ready_together(pair: Callable[..., list[RankRendezvous]]) -> None:
    one, two = pair()
    first = Party(one.ready)
    time.sleep(0.05)
    assert isinstance(first.end(0), TimeoutError), "it waits"
    two.ready()
    assert first.end() is None


def test_a_rank_that_cannot_go_on_is_named(pair: Callable[..., list[RankRendezvous]]) -> None:
    one, two = pair()
    waiting = Party(one.ready)
    with pytest.raises(ValueError, match="no such"), two.reporting_failure():
        raise ValueError("no such file\nand more")
    failure = waiting.end()
    assert isinstance(failure, PeerError)
    assert failure.message == "rank 1 failed: ValueError: no such file"


def test_the_first_failure_is_the_one_that_is_told(
    pair: Callable[..., list[RankRendezvous]],
) -> None:
    one, two = pair()
    two.fail(ValueError("first"))
    one.fail(ValueError("second"))
    with pytest.raises(PeerError, match="rank 1 failed: ValueError: first"):
        one.wait(["never"], "come")


def test_nobody_is_waited_for_for_ever(
    pair: Callable[..., list[RankRendezvous]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_rendezvous, "TIMEOUT", timedelta(seconds=0.1))
    with pytest.raises(PeerError, match=r"not all ranks came to the end within 0:00:00.1"):
        pair()[0].wait(["never"], "the end")


def test_the_store_goes_with_its_host() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    world = worlds(address="127.0.0.1", port=host.port)[1]
    rendezvous = RankRendezvous(world=world, store=client, number=0, ours=True)
    del host
    with pytest.raises(PeerError, match="the store is gone, and with it the rank that hosts it"):
        rendezvous.wait(["never"], "come")
    rendezvous.fail(ValueError("nobody hears"))


def test_rank_0_leaves_last(pair: Callable[..., list[RankRendezvous]]) -> None:
    one, two = pair()
    first = Party(lambda: rank_rendezvous.leave(one))
    time.sleep(0.05)
    assert isinstance(first.end(0), TimeoutError), "it waits"
    rank_rendezvous.leave(two)
    assert first.end() is None


def test_who_hosts_no_store_waits_for_nobody(pair: Callable[..., list[RankRendezvous]]) -> None:
    rank_rendezvous.leave(pair(agent_store=True)[0])
    rank_rendezvous.leave(replace(pair()[0], ours=False))
    rank_rendezvous.leave(pair()[1])
