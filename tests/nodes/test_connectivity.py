"""The connectivity check between hosts that are network namespaces: what it chooses, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hosts import Host, Hosts, require

Check = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def members() -> Iterator[subprocess.Popen[str]]:
    """The process that members are forked from."""
    require()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nodes.members"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    try:
        process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


@pytest.fixture
def check(hosts: Hosts, members: subprocess.Popen[str]) -> Check:
    """Run a check with a member on each host; the store is on the first one."""

    def run(
        *on: Host, interfaces: dict[str, str] | None = None, meet_at: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        asked = [
            {
                "name": host.name,
                "namespace": host.namespace,
                "interface": (interfaces or {}).get(host.name),
                "meet_at": (meet_at or {}).get(host.name, on[0].address),
            }
            for host in on
        ]
        assert members.stdin is not None
        assert members.stdout is not None
        members.stdin.write(json.dumps(asked) + "\n")
        members.stdin.flush()
        told: list[dict[str, Any]] = json.loads(members.stdout.readline())
        return told

    return run


def found_by_all(told: list[dict[str, Any]]) -> Any:
    assert all("found" in one and one["found"] == told[0]["found"] for one in told), told
    return told[0]["found"]


def error_of_all(told: list[dict[str, Any]]) -> str:
    assert all("error" in one and one["error"] == told[0]["error"] for one in told), told
    assert {one["kind"] for one in told} == {"UnreachableError"}
    assert max(one["seconds"] for one in told) < 7, "named in well under 10 s"
    return str(told[0]["error"])


def test_two_hosts_on_one_lan(hosts: Hosts, check: Check) -> None:
    a, b = hosts.lan(2)
    told = check(a, b)
    assert found_by_all(told) == [["eth0", a.address], ["eth0", b.address]]
    assert max(one["seconds"] for one in told) < 3


def test_interfaces_may_have_other_names_on_each_host(hosts: Hosts, check: Check) -> None:
    a, b = (hosts.host(name) for name in "ab")
    switch = hosts.switch()
    switch.plug(a, "10.5.0.1/24", "ib0")
    switch.plug(b, "10.5.0.2/24", "enp3s0f0")
    assert found_by_all(check(a, b)) == [["ib0", "10.5.0.1"], ["enp3s0f0", "10.5.0.2"]]


def test_an_interface_that_leads_nowhere_comes_first(hosts: Hosts, check: Check) -> None:
    a, b, c = made = [hosts.host(name) for name in "abc"]
    b.dead_end("eno1", "10.9.0.2/24")  # before eth0 in the system's list
    c.dead_end("eno1", "10.9.0.3/24")
    b.bridge("docker0", "172.17.0.1/16")
    c.bridge("docker0", "172.17.0.1/16")
    hosts.plug_all(hosts.switch(), made)
    told = check(a, b, c)
    assert found_by_all(told) == [["eth0", host.address] for host in (a, b, c)]
    assert max(one["seconds"] for one in told) < 3, "a dead end costs the quick look only"


def test_hosts_in_two_networks_without_a_route(hosts: Hosts, check: Check) -> None:
    """As containers on bridges of two hosts: each reaches the host with the store, not the other."""
    a, b, c = (hosts.host(name) for name in "abc")
    hosts.plug_all(hosts.switch(), [a, b])
    behind = hosts.switch()
    behind.plug(a, "10.99.0.1/24", "eth1")
    behind.plug(c, "10.99.0.3/24")
    error = error_of_all(check(a, b, c, meet_at={"c": "10.99.0.1"}))
    assert "node 1 (b) and node 2 (c) cannot reach each other:" in error
    assert "  node 1 (b) from no interface to eth0 10.99.0.3 port " in error
    assert f"  node 2 (c) from no interface to eth0 {b.address} port " in error
    assert error.count(": no route") == 2, error


def test_docker_bridges_with_one_address(hosts: Hosts, check: Check) -> None:
    """Each host would reach itself at 172.17.0.1."""
    a, b = hosts.lan(2)
    for host in (a, b):
        host.bridge("docker0", "172.17.0.1/16")
    error = error_of_all(check(a, b, interfaces={"b": "docker0"}))
    assert "node 0 (a) cannot reach node 1 (b), though node 1 (b) reaches node 0 (a):" in error
    assert "from docker0 172.17.0.1 to docker0 172.17.0.1 port" in error
    assert "node 0 (a) has that address itself" in error


def test_two_of_three_are_cut_from_each_other(hosts: Hosts, check: Check) -> None:
    made = [hosts.host(name) for name in "abc"]
    _, b, c = made
    switch = hosts.switch()
    hosts.plug_all(switch, made)
    switch.part(b, c)
    error = error_of_all(check(*made))
    assert error.splitlines()[0] == "node 1 (b) and node 2 (c) cannot reach each other:"
    assert f"  node 1 (b) from eth0 {b.address} to eth0 {c.address} port " in error
    assert f"  node 2 (c) from eth0 {c.address} to eth0 {b.address} port " in error
    assert error.count(": timed out") + error.count(": no answer from the host") == 2
    assert "node 0" not in error, "the pairs that work are not named"


def test_one_way_only(hosts: Hosts, check: Check) -> None:
    a, b = hosts.lan(2)
    b.dead_end("eno1", "10.9.0.2/24")
    error = error_of_all(check(a, b, interfaces={"b": "eno1"}))
    assert "node 0 (a) cannot reach node 1 (b), though node 1 (b) reaches node 0 (a):" in error
    assert "from no interface to eno1 10.9.0.2 port " in error
