"""Launchers that are threads gather: at a host, at an endpoint, in a directory."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import LockstepError, RunDirectoryError, UsageError, WorldError
from lockstep.launch import fixed_rendezvous, rdzv_endpoint
from lockstep.launch.fixed_rendezvous import FixedRendezvous, gather
from lockstep.launch.membership import Launcher, Membership
from lockstep.launch.nodes import Nodes, RendezvousConfig, party
from lockstep.world import membership_check
from tests.unit import threads
from tests.unit.threads import together

_ids = itertools.count()


@pytest.fixture(params=["numbers", "endpoint", "directory"])
def parties(
    request: pytest.FixtureRequest, tmp_path: Path, launch_id: str
) -> Callable[[int], list[RendezvousConfig]]:
    """Make the parties of launchers that find each other in one of three ways."""

    def make(count: int) -> list[RendezvousConfig]:
        if request.param == "numbers":
            return numbered(count, launch_id)
        where = "127.0.0.1" if request.param == "endpoint" else f"file://{tmp_path}"
        return at_endpoint(count, launch_id, where)

    return make


@pytest.fixture
def launch_id(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}/{time.time_ns()}/{next(_ids)}".replace("/", "-")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_check, "_SLACK", timedelta(seconds=0.3))
    monkeypatch.setattr(membership_check, "_SEE_OFF_SECONDS", 0.5)
    monkeypatch.setattr(fixed_rendezvous, "_SEE_OFF_SECONDS", 0.3)


def numbered(count: int, launch_id: str) -> list[RendezvousConfig]:
    return [
        found(Nodes(count=count, rank=rank, main_address="127.0.0.1", id=launch_id))
        for rank in range(count)
    ]


def at_endpoint(count: int, launch_id: str, endpoint: str) -> list[RendezvousConfig]:
    return [found(Nodes(count=count, endpoint=endpoint, id=launch_id))] * count


def found(nodes: Nodes) -> RendezvousConfig:
    one = party(nodes, ["train.py"], {})
    assert one is not None
    return one


def go_on() -> None:
    pass


def join(
    one: RendezvousConfig, ranks: int = 1, seconds: float = 15, **settings: Any
) -> FixedRendezvous:
    own = Launcher(ranks=ranks, name="hosta", cpus=(ranks,))
    settings = {"interface": None, "check": go_on, **settings}
    return gather(one, own, seconds=seconds, **settings)


def join_all(launchers: list[RendezvousConfig], **settings: Any) -> list[Any]:
    """Let launcher k of `launchers` join with k + 1 ranks."""
    calls = [lambda k=k, one=one: join(one, k + 1, **settings) for k, one in enumerate(launchers)]
    return together(*calls, seconds=25)


def check_gathered(told: list[Any]) -> list[FixedRendezvous]:
    """Check that launchers agree on who they are; return them in order."""
    assert all(isinstance(one, FixedRendezvous) for one in told), told
    launchers: list[FixedRendezvous] = sorted(told, key=lambda one: one.roster.index)
    assert [one.roster.index for one in launchers] == list(range(len(told)))
    first = launchers[0].roster
    for one in launchers:
        assert (one.roster.ranks, one.roster.nodes) == (first.ranks, first.nodes)
        assert (one.roster.names, one.roster.address) == (first.names, first.address)
    launchers[0].tell("word", "hello")
    assert [one.hear("word") for one in launchers] == ["hello"] * len(told)
    assert together(*(one.ready for one in launchers)) == [None] * len(told)
    return launchers


def close(launchers: list[FixedRendezvous]) -> None:
    for one in launchers:
        one.close()


# FixedRendezvous.


def test_launchers_of_one_host_gather(
    parties: Callable[[int], list[RendezvousConfig]], tmp_path: Path
) -> None:
    launchers = check_gathered(join_all(parties(3)))
    roster = launchers[0].roster
    assert sorted(roster.ranks) == [1, 2, 3]
    assert (roster.nodes, roster.address, roster.interface) == ((0, 0, 0), "127.0.0.1", None)
    assert roster.names == ("node 0 (hosta)", "node 1 (hosta)", "node 2 (hosta)")
    assert roster.own_cores
    assert not roster.own_gpus
    assert all(one.roster.speaks for one in launchers), "each has an output of its own"
    close(launchers)
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_those_that_were_given(launch_id: str) -> None:
    launchers = join_all(numbered(3, launch_id))
    check_gathered(launchers)
    assert [one.roster.ranks for one in launchers] == [(1, 2, 3)] * 3
    assert [one.roster.index for one in launchers] == [0, 1, 2]


def test_two_launches_at_one_place(parties: Callable[[int], list[RendezvousConfig]]) -> None:
    ours, theirs = (
        parties(2),
        [RendezvousConfig(**{**vars_of(one), "name": f"{one.name}-theirs"}) for one in parties(2)],
    )
    told = join_all([*ours, *theirs])
    close(check_gathered(told[:2]) + check_gathered(told[2:]))


def vars_of(one: RendezvousConfig) -> dict[str, Any]:
    return {name: getattr(one, name) for name in RendezvousConfig.__slots__}


def test_an_id_may_be_long_and_in_any_script(launch_id: str) -> None:
    long = "ä" * 300 + launch_id
    told = join_all(
        at_endpoint(2, f"{long} 1", "127.0.0.1") + at_endpoint(2, f"{long} 2", "127.0.0.1")
    )
    check_gathered(told[:2])
    check_gathered(told[2:])


def test_hosts_are_nodes_and_survey_their_network(
    launch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.local()
    monkeypatch.setattr(membership_check.host, "identity", lambda: own.host)

    def join_on(host: str, one: RendezvousConfig) -> FixedRendezvous:
        own.host = host
        return join(one, interface="lo")

    calls = zip("abb", numbered(3, launch_id), strict=True)
    launchers = check_gathered(
        together(
            *(lambda host=host, one=one: join_on(host, one) for host, one in calls), seconds=25
        )
    )
    roster = launchers[2].roster
    assert roster.nodes == (0, 1, 1)
    assert (roster.node, roster.first_local_rank, roster.local_size) == (1, 1, 2)
    assert (roster.address, roster.interface) == ("127.0.0.1", "lo")
    assert roster.reached_at == ("lo 127.0.0.1",) * 3
    assert roster.overrules_interface


def test_only_the_first_speaks_where_output_is_shared(launch_id: str) -> None:
    by_slurm = [
        RendezvousConfig(name=launch_id, count=2, index=k, address="127.0.0.1", source="slurm")
        for k in (0, 1)
    ]
    told = join_all(by_slurm)
    check_gathered(told)
    assert [one.roster.speaks for one in told] == [True, False]


# What does not fit.


def the_error(told: list[Any]) -> str:
    assert all(isinstance(one, WorldError) for one in told), told
    assert len({one.message for one in told}) == 1, "the same for every launcher"
    assert told[0].hint
    return str(told[0].message)


def test_a_node_that_does_not_come_is_named_to_all(launch_id: str, impatient: None) -> None:
    told = join_all(numbered(3, launch_id)[:2], seconds=0.6)
    assert "node 2 did not come within 0.6 s; came: node 1" in the_error(told)


def test_how_many_did_not_come_to_an_endpoint(launch_id: str, impatient: None) -> None:
    told = join_all(at_endpoint(4, launch_id, "127.0.0.1")[:2], seconds=0.6)
    assert "2 of 3 did not come within 0.6 s; came: a node on" in the_error(told)


def test_who_did_not_come_to_a_directory(launch_id: str, tmp_path: Path, impatient: None) -> None:
    told = join_all(at_endpoint(3, launch_id, str(tmp_path))[:2], seconds=0.3)
    assert "1 of 3 nodes did not come to" in the_error(told)
    assert list(tmp_path.iterdir()) == []


def test_the_first_node_does_not_come(launch_id: str) -> None:
    with pytest.raises(
        WorldError, match=r"node 1 found nobody to meet at 127\.0\.0\.1 within 0\.2"
    ):
        join(numbered(2, launch_id)[1], seconds=0.2)


def test_two_launchers_with_one_number(launch_id: str, impatient: None) -> None:
    first, second, third = numbered(3, launch_id)
    waiting = [threads.Party(lambda one=one: join(one)) for one in (first, second)]
    time.sleep(0.3)
    with pytest.raises(WorldError, match=r"node 1 was turned away .* node 1 has come before"):
        join(second)
    check_gathered([join(third), *(one.end(20) for one in waiting)])


def test_versions_that_differ(
    launch_id: str, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    own = threading.local()
    monkeypatch.setattr(membership_check.host, "versions", lambda: {"torch": own.version})

    def join_with(version: str, one: RendezvousConfig) -> FixedRendezvous:
        own.version = version
        return join(one)

    calls = zip(("2.13", "2.12"), numbered(2, launch_id), strict=True)
    told = together(*(lambda v=v, one=one: join_with(v, one) for v, one in calls), seconds=25)
    assert "has torch 2.12, node 0 on" in the_error(told)


def test_another_count_is_another_launch(launch_id: str, impatient: None) -> None:
    two, three = numbered(2, launch_id)[0], numbered(3, launch_id)[1]
    told = join_all([two, three], seconds=0.4)
    assert "node 1 did not come within 0.4 s; came: nobody" in str(told[0])
    assert "node 1 found nobody to meet" in str(told[1])


def test_a_wrong_interface_is_told_to_all(launch_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(membership_check.host, "identity", lambda: own.host)

    def join_on(host: str, one: RendezvousConfig) -> FixedRendezvous:
        own.host = host
        return join(one, interface="lo" if host == "a" else "eth77")

    calls = zip("ab", numbered(2, launch_id), strict=True)
    told = together(
        *(lambda host=host, one=one: join_on(host, one) for host, one in calls), seconds=25
    )
    assert isinstance(told[0], WorldError)
    assert isinstance(told[1], UsageError)
    assert all("'eth77' does not exist" in one.message for one in told)


def test_a_directory_that_is_not_there(launch_id: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist on"):
        join(at_endpoint(2, launch_id, str(tmp_path / "nowhere"))[0])


# Being stopped.


def test_the_check_ends_it(
    parties: Callable[[int], list[RendezvousConfig]], tmp_path: Path
) -> None:
    began = time.monotonic()

    def stop() -> None:
        if time.monotonic() - began > 0.1:
            raise InterruptedError

    for one in parties(2):
        began = time.monotonic()
        with pytest.raises(InterruptedError):
            join(one, check=stop)
        assert time.monotonic() - began < 5
    assert list(tmp_path.iterdir()) == []


def test_launcher_0_is_stopped_while_others_wait(launch_id: str, impatient: None) -> None:
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise InterruptedError

    first, second, _ = numbered(3, launch_id)

    def host() -> str:
        with contextlib.suppress(InterruptedError):
            join(first, check=check)
        return "stopped, and its store with it"

    hosting = threads.Party(host)
    waiting = threads.Party(lambda: join(second))
    time.sleep(0.3)
    stopped.set()
    assert str(hosting.end()).startswith("stopped")
    failure = waiting.end()
    assert isinstance(failure, WorldError)
    assert "node 0 is gone" in failure.message


# Who hosts.


def test_one_launcher_of_a_host_holds_the_lock(launch_id: str) -> None:
    with rdzv_endpoint.host_lock(launch_id) as first, rdzv_endpoint.host_lock(launch_id) as second:
        assert (first, second) == (True, False)
        with rdzv_endpoint.host_lock(f"{launch_id} other") as other:
            assert other
    with rdzv_endpoint.host_lock(launch_id) as again:
        assert again


@pytest.mark.parametrize("held", [False, True])
def test_what_fails_under_the_lock_is_not_the_locks(held: bool, launch_id: str) -> None:
    with contextlib.ExitStack() as stack:
        if held:
            stack.enter_context(rdzv_endpoint.host_lock(launch_id))
        with (
            pytest.raises(OSError, match="no space"),
            rdzv_endpoint.host_lock(launch_id),
        ):
            raise OSError(errno.ENOSPC, "no space")


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("203.0.113.7", False)],
)
def test_whether_an_endpoint_is_here(address: str, here: bool) -> None:
    one = RendezvousConfig(name="x", count=2, address=address, source="--rdzv-endpoint")
    assert rdzv_endpoint.is_here(one) == here


# After gathering.


@pytest.fixture
def pair() -> list[FixedRendezvous]:
    store = dist.HashStore()
    return [FixedRendezvous(store, a_roster(index), go_on) for index in (0, 1)]


def a_roster(index: int) -> Membership:
    return Membership(
        index=index,
        ranks=(1, 1),
        nodes=(0, 1),
        names=("node 0 (a)", "node 1 (b)"),
        address="127.0.0.1",
        interface=None,
    )


def test_launchers_are_ready_together(pair: list[FixedRendezvous]) -> None:
    waiting = threads.Party(pair[0].ready)
    assert isinstance(waiting.end(0.05), TimeoutError), "it waits"
    pair[1].ready()
    assert waiting.end() is None


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_cannot_go_on_is_named(pair: list[FixedRendezvous], failing: int) -> None:
    other = pair[1 - failing]
    waiting = [threads.Party(other.ready), threads.Party(lambda: other.hear("directory"))]
    pair[failing].fail(RunDirectoryError("the disk is full"))
    for failure in (one.end() for one in waiting):
        assert isinstance(failure, WorldError)
        name = f"node {failing} ({'ab'[failing]})"
        assert failure.message == f"{name} cannot start its ranks: the disk is full"


def test_launcher_0_stays_until_its_failure_is_heard(pair: list[FixedRendezvous]) -> None:
    failing = threads.Party(lambda: pair[0].fail(LockstepError("no")))
    assert isinstance(failing.end(0.05), TimeoutError), "it waits"
    with pytest.raises(WorldError):
        pair[1].ready()
    assert failing.end() is None


def test_the_first_failure_is_told(pair: list[FixedRendezvous], impatient: None) -> None:
    pair[1].fail(LockstepError("first"))
    pair[0].fail(LockstepError("second"))
    with pytest.raises(WorldError, match="cannot start its ranks: first"):
        pair[0].ready()


def test_launchers_that_never_get_ready(
    pair: list[FixedRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_rendezvous, "_SECONDS", 0.1)
    with pytest.raises(WorldError, match=r"not all launchers were ready within 0.1 s"):
        pair[0].ready()


def test_launcher_0_leaves_without_a_word() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    one = FixedRendezvous(client, a_roster(1), go_on)
    waiting = threads.Party(lambda: one.hear("directory"))
    time.sleep(0.05)
    del host
    failure = waiting.end()
    assert isinstance(failure, WorldError)
    assert failure.message == "node 0 (a) left before the launch began"


def test_launchers_that_come_and_go_are_told_that_no_port_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"localhost:{taken.getsockname()[1]}"
        one = party(Nodes(least=1, count=2, endpoint=endpoint), ["x"], {})
        assert one is not None
        with pytest.raises(WorldError, match="no port is free"):
            rdzv_endpoint.enter(one, 5, lambda: None)
