"""Parameter servers of a launch on several hosts: they are with the first rank, and all reach them (A3)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.hosts import Hosts

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]

ENV = {"OMP_NUM_THREADS": "1"}
#: The server is a process of the first rank's host.
KILL = """
                first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
                if run.step == 5 and run.is_main_process and first:
                    log = (run.directory / "logs" / "server-0.log").read_text()
                    os.kill(int(log.split("process ")[1].split()[0]), signal.SIGKILL)
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("more", "kills"), [((), True), (("--staleness", "0"), False)], ids=["killed", "updates"]
)
def test_servers_reached_from_another_host(
    hosts: Hosts, lockstep: Lockstep, tmp_path: Path, more: tuple[str, ...], *, kills: bool
) -> None:
    lockstep.script(SCRIPT)
    expected = digest_of(lockstep.python("train.py", env=ENV).out)
    if kills:
        body = "            for x, y in run.loader(data, batch_size=8, shuffle=True):\n"
        assert body in SCRIPT
        lockstep.script("import os, signal\n" + SCRIPT.replace(body, body.rstrip() + KILL))
    words = ("--nnodes", "2", "-n", "1", "--servers", "2", "--strategy", "ps", "--run-dir", "r")
    made = hosts.lan(2)
    command = (sys.executable, "-m", "lockstep", "run", *words, *more)
    started = [
        host.start(*command, "--rdzv-endpoint", "a", "train.py", cwd=tmp_path, env=ENV)
        for host in made
    ]
    done = hosts.finish(started)
    told = "".join(each.err for each in done)
    assert digest_of("".join(each.out for each in done)) == expected, told
    assert ("server 0 was killed by signal 9 (SIGKILL); restart 1" in told) == kills
    addresses = {host.address for host in made}
    for index in (0, 1):
        log = (tmp_path / f"r/logs/server-{index}.log").read_text()
        found = re.findall(r"listens at (\S+) on port", log)
        assert len(found) == 1 + kills
        assert set(found) <= addresses, "where the others reach it, not everywhere"
