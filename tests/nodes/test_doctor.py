"""`lockstep doctor --nnodes` on hosts that are network namespaces, healthy and disturbed (B6, A9)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, Hosts

pytestmark = pytest.mark.forked

ROOT = Path(__file__).parents[2]


def start(
    made: list[Host],
    directory: Path,
    *flags: str,
    defects: dict[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the doctor on all hosts; some of them have `defects`, by name."""
    place = ("doctor", "--nnodes", str(len(made)), "--master-addr", "a", *flags)
    started = []
    for rank, host in enumerate(made):
        has = (defects or {}).get(host.name)
        program = ("lockstep",) if has is None else ("tests.nodes.defective", has)
        command = (sys.executable, "-m", *program, *place, "--node-rank", str(rank))
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(host.start(*command, cwd=directory, env=env))
    return started


def reports(
    hosts: Hosts, started: list[subprocess.Popen[str]], code: int | None
) -> list[dict[str, Any]]:
    return [json.loads(one.out) for one in hosts.finish(started, code=code)]


def lines(report: dict[str, Any], *levels: str) -> dict[str, list[str]]:
    """Return what a report says at these levels, by check."""
    found: dict[str, list[str]] = {}
    for one in report["findings"]:
        if one["level"] in levels:
            found.setdefault(one["check"], []).append(one["text"])
    return found


def test_two_healthy_nodes(hosts: Hosts, tmp_path: Path) -> None:
    on_a, on_b = reports(hosts, start(hosts.lan(2), tmp_path, "--json"), 0)
    assert on_a["nodes"] == on_b["nodes"] == ["node 0 (a)", "node 1 (b)"]
    assert on_a["findings"] == on_b["findings"], "all nodes come to the same report"
    assert not lines(on_a, "failure")
    assert set(lines(on_a, "warning")) <= {"links", "memory"}, "what else runs on this machine"
    fine = lines(on_a, "ok")
    assert "node 0 (a) at eth0 10.70.0.1, node 1 (b) at eth0 10.70.0.2" in fine["network"][0]
    assert fine["shared"] == ["all nodes share the run directory, and its locks"]
    assert "gloo on 2 ranks: 1 MiB in " in fine["all-reduce"][0]
    assert "node 0 (a): cpu, node 1 (b): cpu" in fine["training"][0]


def test_each_disturbance_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """A slow link, a clock set off, a full /dev/shm, unlike versions, a wrong bit: found in one go."""
    made = hosts.lan(3)
    made[1].slow("100mbit")
    defects = {"b": "clock,shm,versions", "c": "bit"}
    found = reports(hosts, start(made, tmp_path, "--json", defects=defects), 1)[0]
    failures, warnings = lines(found, "failure"), lines(found, "warning")
    assert set(failures) == {"shm", "versions", "training"}
    assert failures["shm"][0].startswith(
        "node 1 (b): 1 MiB cannot be had of /dev/shm: no space left"
    )
    assert "node 1 (b) has numpy 1.26.4, node 0 (a) has " in failures["versions"][0]
    assert len(failures["training"]) == 1
    assert failures["training"][0].startswith("node 2 (c): cpu computes wrong bits")
    assert warnings["clocks"][0].startswith(
        "the clock of node 1 (b) is 300 s ahead of that of node 0 (a)"
    )
    slow = warnings["links"]
    assert len(slow) == 2
    assert all(one.startswith("node 1 (b) to node ") for one in slow), slow
    assert ", the slowest" in slow[0]
    assert all(int(one.partition(": ")[2].partition(" Mbit/s")[0]) <= 110 for one in slow)


@pytest.mark.wide
def test_a_wrong_route(hosts: Hosts, tmp_path: Path) -> None:
    made = hosts.lan(3)
    made[1].ip("route", "add", "blackhole", f"{made[2].address}/32")
    found = reports(hosts, start(made, tmp_path, "--json"), 1)[0]
    failures = lines(found, "failure")
    assert set(failures) == {"network"}
    assert failures["network"][0].startswith(
        "node 1 (b) and node 2 (c) cannot reach each other: node 1 (b) from no interface to eth0"
    )
    assert "no route" in failures["network"][0]
    assert set(lines(found, "skipped")) >= {"links", "all-reduce"}
    assert "training" in lines(found, "ok"), "the rest is looked at all the same"


@pytest.mark.wide
def test_an_interface_that_vanishes_while_it_is_measured(hosts: Hosts, tmp_path: Path) -> None:
    made = hosts.lan(2)
    on_a, on_b = reports(hosts, start(made, tmp_path, "--json", defects={"b": "interface"}), 1)
    (on_a,), (on_b,) = lines(on_a, "failure")["links"], lines(on_b, "failure")["links"]
    assert on_a.startswith("nothing more was heard of node 1 (b)")
    assert on_b.startswith(f"the interface eth0 {made[1].address} of node 1 (b) is gone")


def test_a_node_that_does_not_come(hosts: Hosts, tmp_path: Path) -> None:
    a, _ = hosts.lan(2)
    flags = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--join-timeout", "1")
    command = (sys.executable, "-m", "lockstep", "doctor", *flags)
    (done,) = hosts.finish([a.start(*command, cwd=tmp_path)], code=3)
    first = done.out.splitlines()[0].split(maxsplit=2)
    assert first[:2] == ["failure", "nodes"]
    assert first[2].startswith("1 of 2 nodes did not come within 1 s: node 1; came: a. Do: ")
    assert "ok       training " in done.out, "this node is looked at all the same"
    assert "skipped  clocks      not compared: the other nodes did not come" in done.out
    assert done.out.splitlines()[-1].startswith("1 of 2 nodes, ")
