"""The exchange over hosts with several ranks each, which are network namespaces (A4, B1)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.hosts import Host, Hosts, wait_until

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]

#: Writes the ranks of each host that the exchange has found, and ends ranks if asked to.
FOUND = """
import json, os, signal, sys
from pathlib import Path
from lockstep.engine.exchange import hosts

find = hosts.find_hosts
def find_hosts(group):
    found = find(group)
    Path("found").write_text(json.dumps([len(ranks) for ranks in found]))
    return found
hosts.find_hosts = find_hosts
"""
#: Kills all ranks of the second host in their fourth exchange, in which those of the first wait for them.
ENDS = """
from lockstep.engine.exchange.shared_memory import SharedMemoryExchange

start, calls = SharedMemoryExchange.start, []
def ends(self, slots, **more):
    calls.append(1)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and len(calls) == 4 and int(os.environ["RANK"]) >= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return start(self, slots, **more)
SharedMemoryExchange.start = ends
"""
#: Halts the ranks of the second host in their fourth exchange, so that the test can kill the host.
HALTS = ENDS.replace(
    "os.kill(os.getpid(), signal.SIGKILL)", "Path('halted').touch(); signal.pause()"
)
#: Lets recursive halving begin with two hosts.
HALVES = """
from lockstep.engine.layout import halving

halving.FEWEST = 2
"""


def launch(
    made: list[Host], directory: Path, ranks: tuple[int, ...], nnodes: str = ""
) -> list[subprocess.Popen[str]]:
    """Start a launcher with some ranks on each host."""
    place = (
        "--nnodes",
        nnodes or str(len(made)),
        "--master-addr",
        made[0].address,
        "--exchange",
        "tree",
    )
    return [
        host.start(
            *(sys.executable, "-m", "lockstep", "run", *place, "-n", str(count)),
            *("--node-rank", str(number), "train.py"),
            cwd=directory,
            env={"OMP_NUM_THREADS": "1"},
        )
        for number, (host, count) in enumerate(zip(made, ranks, strict=True))
    ]


@pytest.fixture
def expected(lockstep: Lockstep, tmp_path: Path) -> str:
    """The digest of one process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return digest_of(lockstep.python("train.py", env={"OMP_NUM_THREADS": "1"}).out)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [(3, 1), (1, 2, 1)], ids=str)
def test_hosts_with_unequal_numbers_of_ranks(
    hosts: Hosts, tmp_path: Path, expected: str, ranks: tuple[int, ...]
) -> None:
    (tmp_path / "train.py").write_text(FOUND + SCRIPT)
    done = hosts.finish(launch(hosts.lan(len(ranks)), tmp_path, ranks))
    assert digest_of(done[0].out) == expected
    assert json.loads((tmp_path / "found").read_text()) == [*ranks]


def test_two_hosts_with_one_name(hosts: Hosts, tmp_path: Path, expected: str) -> None:
    (tmp_path / "train.py").write_text(FOUND + SCRIPT)
    made = hosts.lan(2)
    made[1].name = made[0].name
    done = hosts.finish(launch(made, tmp_path, (2, 2)))
    assert digest_of(done[0].out) == expected
    assert json.loads((tmp_path / "found").read_text()) == [2, 2]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("halves", ["", HALVES], ids=["direct", "recursive halving"])
def test_a_host_that_drops_out_of_an_exchange(
    hosts: Hosts, tmp_path: Path, expected: str, halves: str
) -> None:
    (tmp_path / "train.py").write_text(halves + FOUND + ENDS + SCRIPT)
    first, second = hosts.finish(launch(hosts.lan(2), tmp_path, (2, 2)))
    assert digest_of(first.out) == expected
    for told in (first.err, second.err):
        assert re.search(r"rank [23] was killed by signal 9 \(SIGKILL\); restart 1, ", told), told
        assert "restart 2" not in told


def test_a_host_that_dies_with_its_launcher_in_an_exchange(
    hosts: Hosts, tmp_path: Path, expected: str
) -> None:
    (tmp_path / "train.py").write_text(FOUND + HALTS + SCRIPT)
    launched = launch(hosts.lan(2), tmp_path, (2, 2), nnodes="1:2")
    wait_until((tmp_path / "halted").exists, "the ranks of the second host did not halt")
    os.killpg(launched[1].pid, signal.SIGKILL)
    first, second = hosts.finish(launched, code=None)
    assert (first.code, second.code) == (0, -signal.SIGKILL)
    assert digest_of(first.out) == expected


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft (nftables) is not installed")
def test_a_link_that_loses_packets(hosts: Hosts, tmp_path: Path, expected: str) -> None:
    made = hosts.lan(2)
    for host in made:
        host.lose(percent=1)
    done = hosts.finish(launch(made, tmp_path, (2, 2)))
    assert digest_of(done[0].out) == expected
    assert all(host.lost() > 0 for host in made)
