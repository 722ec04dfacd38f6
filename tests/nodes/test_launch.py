"""`lockstep run --nnodes` on several hosts, which are network namespaces (B9, A8, B6)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep
from tests.distributed.test_launchers import SCRIPT, digest_of
from tests.hosts import Host, Hosts

pytestmark = pytest.mark.ranks(4)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process."""
    command = Lockstep(tmp_path_factory.mktemp("single"))
    command.script(SCRIPT)
    return digest_of(command.python("train.py", env={"OMP_NUM_THREADS": "1"}).out)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the nodes run: they share it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(
    host: Host,
    directory: Path,
    *flags: str,
    hidden: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `lockstep run flags train.py` on a host."""
    return host.start(
        sys.executable,
        *("-m", "lockstep", "run", *flags, "train.py"),
        cwd=directory,
        hidden=hidden,
        env={"OMP_NUM_THREADS": "1", **(env or {})},
    )


def nodes(
    hosts: list[Host], directory: Path, *flags: str, ranks: int = 2
) -> list[subprocess.Popen[str]]:
    count = ("--nnodes", str(len(hosts)), "-n", str(ranks))
    return [start(host, directory, *count, *flags) for host in hosts]


def static(
    hosts: list[Host], directory: Path, *flags: str, main: str, ranks: int = 2
) -> list[subprocess.Popen[str]]:
    """Start a node on each host, with numbers that somebody gave."""
    return [
        start(
            host,
            directory,
            *("--nnodes", str(len(hosts)), "-n", str(ranks)),
            *("--node-rank", str(rank), "--master-addr", main, *flags),
        )
        for rank, host in enumerate(hosts)
    ]


def digests(done: list[Done]) -> str:
    """The digest is told by one node."""
    assert [one.code for one in done] == [0] * len(done), done
    return digest_of("".join(one.out for one in done))


def test_static(hosts: Hosts, directory: Path, expected: str) -> None:
    made = hosts.lan(2)
    assert digests(hosts.finish(static(made, directory, main="a"))) == expected


def test_by_endpoint(hosts: Hosts, directory: Path, expected: str) -> None:
    made = hosts.lan(2)
    assert digests(hosts.finish(nodes(made, directory, "--rdzv-endpoint", "a"))) == expected


def test_by_endpoint_with_a_port(hosts: Hosts, directory: Path, expected: str) -> None:
    a, b = hosts.lan(2)
    flags = ("--rdzv-endpoint", f"{b.address}:29512", "--rdzv-id", "job")
    assert digests(hosts.finish(nodes([a, b], directory, *flags))) == expected


def test_by_a_shared_directory(hosts: Hosts, directory: Path, expected: str) -> None:
    meeting = directory / "meeting"
    meeting.mkdir()
    flags = ("--rdzv-endpoint", f"file://{meeting}")
    made = hosts.lan(2)
    assert digests(hosts.finish(nodes(made, directory, *flags))) == expected
    assert list(meeting.iterdir()) == [], "nothing stays"


def test_three_hosts_one_with_an_interface_that_leads_nowhere(
    hosts: Hosts, directory: Path, expected: str
) -> None:
    made = [hosts.host(name) for name in "abc"]
    made[1].dead_end("eno1", "10.9.0.2/24")
    hosts.plug_all(hosts.switch(), made)
    assert digests(hosts.finish(static(made, directory, main="a", ranks=1))) == expected
