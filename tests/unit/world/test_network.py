"""Interfaces of this host and addresses of others, from the system's own answers."""

from __future__ import annotations

import errno
import os
import resource
import socket
import time

import pytest

from lockstep.errors import UnreachableError, UsageError, WorldError
from lockstep.world import network
from lockstep.world.network import Interface


def test_the_loopback_interface_is_there_and_known_as_such() -> None:
    assert Interface("lo", "127.0.0.1") in network.interfaces()


def test_link_local_addresses_are_not_offered() -> None:
    assert not any(one.address.startswith(("fe80:", "169.254.")) for one in network.interfaces())


def test_an_interface_by_name() -> None:
    assert network.named("lo").address == "127.0.0.1"


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UsageError, match=r"'eth77' does not exist on .*lo \(127.0.0.1\)") as caught:
        network.named("eth77")
    assert "--interface" in (caught.value.hint or "")


def test_the_way_to_this_host() -> None:
    found = network.interface_towards("127.0.0.1")
    assert found == Interface("lo", "127.0.0.1")
    assert network.interface_towards("127.0.0.1", among=[]) is None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("SH-IDC1-10-5-36-65", "10.5.36.65"),
        ("ip-10-0-3-7", "10.0.3.7"),
        ("ip-10-0-3-7.eu-west-1.compute.internal", "10.0.3.7"),
        ("10-0-3-7", "10.0.3.7"),
        ("node_192_168_1_20", "192.168.1.20"),
        ("gpu-010-005-036-065", "10.5.36.65"),
    ],
)
def test_names_that_carry_an_address(host: str, address: str) -> None:
    assert network.carried_address(host) == address


@pytest.mark.parametrize(
    "host",
    [
        "node17",
        "rack-3-4-17",
        "ip-10-0-3-777",
        "x-127-0-0-1",
        "a-0-0-0-0",
        "a-240-1-2-3",
        "n-1-2-3-4a",
        "",
    ],
)
def test_names_that_carry_none(host: str) -> None:
    assert network.carried_address(host) is None


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.1.2.3", "10.1.2.3"), ("[fd00::1]", "fd00::1"), ("fd00::1", "fd00::1")],
)
def test_a_literal_is_asked_of_nobody(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_resolve", lambda _: pytest.fail("asked"))
    assert network.addresses_of(host) == (address,)


def test_the_resolver_comes_first() -> None:
    assert "127.0.0.1" in network.addresses_of("localhost")


def refuse(*_: object, **__: object) -> object:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_the_resolver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert network.addresses_of("SH-IDC1-10-5-36-65") == ("10.5.36.65",)


def test_slurm_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("lockstep.world.slurm_nodes.address", {"n1": "10.7.0.1"}.get)
    assert network.addresses_of("n1") == ("10.7.0.1",)
    with pytest.raises(UnreachableError, match="'n2' has no address: the resolver said 'Name or"):
        network.addresses_of("n2")


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_RESOLVER_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(1) or [])
    monkeypatch.setattr("lockstep.world.slurm_nodes.address", {}.get)
    with pytest.raises(UnreachableError, match=r"the resolver did not answer within 0\.1 s"):
        network.addresses_of("far-away")


# Listening.


@pytest.mark.parametrize(
    ("address", "is_loopback", "listens_locally"),
    [
        ("localhost", True, True),
        ("127.0.0.1", True, True),
        ("127.0.1.1", True, False),
        ("::1", True, False),
        ("10.0.0.1", False, False),
        ("127.example.org", False, False),
        ("", False, False),
        (None, False, False),
    ],
)
def test_loopback_addresses(address: str | None, is_loopback: bool, listens_locally: bool) -> None:
    assert network.is_loopback(address) == is_loopback
    assert network.listens_locally(address) == listens_locally


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.1.1", "::1"])
def test_a_listener_is_found_at_its_address(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with network.listen(0, loopback=network.listens_locally(address)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection((address, port), timeout=2).close()
        for loopback in (True, False):
            with pytest.raises(OSError, match="in use"):
                network.listen(port, loopback=loopback)


@pytest.mark.parametrize("loopback", [True, False])
def test_a_host_without_a_free_descriptor_says_so(
    loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(WorldError, match=r"cannot listen .*: too many open files") as caught:
        network.listen(0, loopback=loopback)
    assert "ulimit -n" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("error", "words", "unreached"),
    [
        (TimeoutError(), "timed out", "timed out"),
        (
            OSError(113, "No route to host"),
            "no route to host",
            "no answer from the host, or no route",
        ),
        (OSError(101, "Network is unreachable"), "network is unreachable", "no route"),
        (OSError(111, "Connection refused"), "connection refused", "connection refused"),
        (OSError("odd"), "odd", "odd"),
    ],
)
def test_reasons(error: OSError, words: str, unreached: str) -> None:
    assert network.reason(error) == words
    assert network.why_unreached(error).startswith(unreached)


@pytest.mark.parametrize(
    ("soft", "hard", "more", "limit"),
    [
        (1024, 4096, 0, 1024),
        (1024, 4096, 1000, 2256),
        (1024, 4096, 99_999, 4096),
        (1024, resource.RLIM_INFINITY, 99_999, 101_255),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 99_999, resource.RLIM_INFINITY),
        (1024, 1256, 99_999, 1256),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed(
    soft: int, hard: int, more: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    network.require_files(1000 if more else 700, more)
    assert limits == {resource.RLIMIT_NOFILE: (limit, hard)}


def test_a_host_that_allows_too_few_open_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1255))
    expected = "allows 1255 open files for a process; 1000 other launchers need 1256"
    with pytest.raises(WorldError, match=expected) as caught:
        network.require_files(1000, 0)
    assert "ulimit -Hn" in str(caught.value.hint)
