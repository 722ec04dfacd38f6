"""`lockstep run --nnodes` on several hosts, which are network namespaces (B9, A8, B6)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.hosts import Host, Hosts
from tests.template import Template

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]


@pytest.fixture(scope="module")
def expected(template: Template, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process."""
    command = Lockstep(tmp_path_factory.mktemp("single"), template)
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
    program: tuple[str, ...] = ("-m", "lockstep"),
) -> subprocess.Popen[str]:
    """Start `lockstep run flags train.py` on a host."""
    return host.start(
        sys.executable,
        *(*program, "run", *flags, "train.py"),
        cwd=directory,
        hidden=hidden,
        env={"OMP_NUM_THREADS": "1", **(env or {})},
    )


def nodes(
    hosts: list[Host], directory: Path, *flags: str, ranks: int = 1
) -> list[subprocess.Popen[str]]:
    """Start a node on each host; they number themselves."""
    count = ("--nnodes", str(len(hosts)), "-n", str(ranks))
    return [start(host, directory, *count, *flags) for host in hosts]


def static(
    hosts: list[Host],
    directory: Path,
    *flags: str,
    main: str,
    ranks: int = 1,
    first: int = 0,
    count: int | None = None,
    env: dict[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start a node on each host, with numbers from `first` on."""
    of = ("--nnodes", str(count or first + len(hosts)), "-n", str(ranks), "--master-addr", main)
    return [
        start(host, directory, *of, "--node-rank", str(rank), *flags, env=env)
        for rank, host in enumerate(hosts, first)
    ]


def kill_when_met(process: subprocess.Popen[str], rendezvous: Path) -> None:
    """Kill a node, and what it started, once it has written to the file in which nodes meet."""
    deadline = time.monotonic() + 30
    while not any(file.stat().st_size for file in rendezvous.iterdir()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)


def digests(done: list[Done]) -> str:
    """The digest is told by one node."""
    assert [one.code for one in done] == [0] * len(done), done
    return digest_of("".join(one.out for one in done))


def test_static(hosts: Hosts, directory: Path, expected: str) -> None:
    made = hosts.lan(2)
    started = static(made, directory, "--master-port", "29511", main="a", ranks=2)
    assert digests(hosts.finish(started)) == expected


@pytest.mark.wide
def test_by_endpoint_with_a_port_and_a_name(hosts: Hosts, directory: Path, expected: str) -> None:
    a, b = hosts.lan(2)
    flags = ("--rdzv-endpoint", f"{b.address}:29512", "--rdzv-id", "job")
    assert digests(hosts.finish(nodes([a, b], directory, *flags))) == expected


def test_by_a_shared_directory_with_a_stale_file(
    hosts: Hosts, directory: Path, expected: str
) -> None:
    rendezvous = directory / "rendezvous"
    rendezvous.mkdir()
    flags = ("--rdzv-endpoint", f"file://{rendezvous}")
    made = hosts.lan(2)
    kill_when_met(start(made[0], directory, "--nnodes", "2", *flags), rendezvous)
    assert list(rendezvous.iterdir()), "a killed launch leaves its file behind"
    assert digests(hosts.finish(nodes(made, directory, *flags))) == expected
    assert list(rendezvous.iterdir()) == [], "nothing stays"


def test_a_script_that_fails_on_one_host_is_told_on_both(hosts: Hosts, directory: Path) -> None:
    (directory / "train.py").write_text("import os\nassert os.environ['RANK'] != '1', 'bad disk'\n")
    done = hosts.finish(static(hosts.lan(2), directory, main="a"), code=1)
    for one in done:
        assert "rank 1 of 2 failed on b: AssertionError: bad disk" in one.err


def errors(hosts: Hosts, started: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for launches that cannot work; return what each says."""
    done = hosts.finish(started, code=2)
    assert all("Traceback" not in one.err for one in done), done
    return [one.err[one.err.index("lockstep: error: ") :] for one in done]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("address", "why"),
    [("10.200.0.1", "unreachable"), ("10.70.0.77", "no route|timed out"), ("nosuch", "resolver")],
)
def test_a_main_address_that_nobody_reaches(
    address: str, why: str, hosts: Hosts, directory: Path
) -> None:
    _, b = hosts.lan(2)
    began = time.monotonic()
    (told,) = errors(hosts, static([b], directory, main=address, first=1))
    assert time.monotonic() - began < 10 + slowness(), "named in under 10 s"
    assert address in told
    assert re.search(why, told)


def slowness() -> float:
    """Seconds to allow for on a machine with less than a core for this test: torch is imported first."""
    return 3 * os.getloadavg()[0] / (os.cpu_count() or 1)


def test_a_node_that_never_comes(hosts: Hosts, directory: Path) -> None:
    a, b = hosts.lan(2)
    first = static([a], directory, "--join-timeout", "3", main="a", count=2)
    (told,) = errors(hosts, first)
    assert "1 of 2 nodes did not come within 3 s: node 1; came: a" in told
    second = static([b], directory, "--join-timeout", "3", main="a", first=1)
    (told,) = errors(hosts, second)
    assert "node 1 found no rendezvous at 10.70.0.1 within 3 s" in told


@pytest.mark.wide
def test_two_nodes_with_one_number(hosts: Hosts, directory: Path) -> None:
    flags = ("--nnodes", "3", "--master-addr", "a", "--join-timeout", "5")
    numbered = zip(hosts.lan(3), ("0", "1", "1"), strict=True)
    told = errors(
        hosts, [start(host, directory, *flags, "--node-rank", rank) for host, rank in numbered]
    )
    assert told[0] == told[1] == told[2]
    assert re.search(r"node 1 has come twice: on [bc], process \d+, and on [bc], process", told[0])


@pytest.mark.wide
def test_a_directory_that_is_not_shared(hosts: Hosts, directory: Path) -> None:
    rendezvous = directory / "rendezvous"
    rendezvous.mkdir()
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"file://{rendezvous}", "--join-timeout", "4")
    a, b = hosts.lan(2)
    told = errors(
        hosts, [start(a, directory, *flags), start(b, directory, *flags, hidden=rendezvous)]
    )
    for one, host in zip(told, "ab", strict=True):
        assert "1 of 2 nodes did not come" in one
        assert f"came: {host}" in one
        assert "the directory is not shared between the nodes" in one


@pytest.mark.wide
def test_a_directory_that_is_not_there(hosts: Hosts, directory: Path) -> None:
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"file://{directory}/nowhere")
    (told,) = errors(hosts, [start(hosts.lan(1)[0], directory, *flags)])
    assert f"the directory {directory}/nowhere does not exist on a" in told


@pytest.mark.wide
def test_an_interface_that_is_not_there(hosts: Hosts, directory: Path) -> None:
    a, b = hosts.lan(2)
    started = static([a], directory, "--join-timeout", "6", main="a", count=2)
    started += static([b], directory, "--interface", "ib7", main="a", first=1)
    told = errors(hosts, started)
    assert (
        "the interface 'ib7' does not exist on b; expected one of: lo (127.0.0.1), eth0" in told[1]
    )
    assert "node 1" in told[0]


def test_an_interface_that_leads_nowhere_is_not_taken_silently(
    hosts: Hosts, directory: Path
) -> None:
    a, b = hosts.lan(2)
    b.dead_end("eno1", "10.9.0.2/24")
    started = static([a], directory, main="a", count=2)
    started += static([b], directory, main="a", first=1, env={"LOCKSTEP_INTERFACE": "eno1"})
    told = errors(hosts, started)
    assert told[0] == told[1]
    assert "node 0 (a) cannot reach node 1 (b), though node 1 (b) reaches node 0 (a):" in told[0]


@pytest.mark.wide
def test_versions_that_differ(hosts: Hosts, directory: Path) -> None:
    (directory / "old.py").write_text(
        "import lockstep.version\nlockstep.version.__version__ = '0.0.9'\n"
        "from lockstep.cli import main\nraise SystemExit(main())\n"
    )
    flags = ("--nnodes", "2", "--master-addr", "a", "--node-rank")
    a, b = hosts.lan(2)
    started = [start(a, directory, *flags, "0")]
    started += [start(b, directory, *flags, "1", program=("old.py",))]
    told = errors(hosts, started)
    assert told[0] == told[1]
    assert "b has lockstep 0.0.9, a has " in told[0]
