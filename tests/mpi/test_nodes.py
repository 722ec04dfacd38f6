"""Ranks on two hosts, of which nothing says where the first one is: they ask MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import Host, Hosts
from tests.mpi.conftest import SCRIPT, digests_of
from tests.mpi.libraries import Mpi

pytestmark = pytest.mark.ranks(2)

#: What mpiexec takes for ssh: options, a host, a command.
_SHELL = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
host=$1; shift
case "$host" in
{cases}
esac
exec ip netns exec "$namespace" unshare --uts sh -c "echo $host >/proc/sys/kernel/hostname; $*"
"""


def shell(directory: Path, hosts: list[Host]) -> str:
    """Write a remote shell that knows `hosts`."""
    cases = "\n".join(f"{host.name}) namespace={host.namespace};;" for host in hosts)
    path = directory / "shell"
    path.write_text(_SHELL.format(cases=cases))
    path.chmod(0o755)
    return str(path)


def options(mpi: Mpi, remote_shell: str, first: Host) -> list[str]:
    if mpi.name == "mpich":
        launcher = ["-launcher", "ssh", "-launcher-exec", remote_shell]
        return [*launcher, "-localhost", first.address, "-hosts", "a,b", "-ppn", "1"]
    return ["--prtemca", "plm_ssh_agent", remote_shell, "--host", "a:1,b:1"]


@pytest.mark.wide(beyond=1)
def test_two_hosts(mpi: Mpi, hosts: Hosts, expected: str, tmp_path: Path) -> None:
    a, b = hosts.lan(2)
    mpi.lockstep.script(SCRIPT)
    words = [
        *options(mpi, shell(tmp_path, [a, b]), a),
        *mpi.words(2, "train.py", "auto", "mpi", crowded=False),
    ]
    job = a.start(mpi.mpiexec, *words, env=mpi.variables, cwd=tmp_path)
    (done,) = hosts.finish([job])
    assert digests_of(done.out) == [expected] * 2, done
    assert "exchange native" in done.err
