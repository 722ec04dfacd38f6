"""What another user of the machine reaches of a run: its listeners, its files, its variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Lockstep

pytestmark = [
    pytest.mark.forked,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user"),
]

RUN = """
import os, time
import torch
import lockstep

with lockstep.Run("private", replicas=2, progress=False) as run:
    model = run.model(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x in run.loader([torch.full((4,), float(i)) for i in range(16)], batch_size=2):
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=1.0)
        if run.step == 4:
            open(f"here-{run.world.rank}", "w").write(str(os.getpid()))
            while not os.path.exists("go"):
                time.sleep(0.02)
"""
PLAIN = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
open(f"here-{dist.get_rank()}", "w").write(str(os.getpid()))
while not os.path.exists("go"):
    time.sleep(0.02)
dist.barrier()
"""
#: Tries each port in a process: torch waits without end for what listens and says nothing.
STRANGER = """
import json, os, signal, socket, sys
import torch.distributed as dist

socket.getaddrinfo("127.0.0.1", 1)  # imports that need the rights of before
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ports, files = json.loads(sys.argv[1])
found = {"said": {}, "store": [], "files": {}}

def use_as_store(port):
    signal.alarm(3)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set("lockstep/0/0/failed", "by another user")
    store.get("lockstep/0/0/failed")
    os._exit(0)

def talk(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as line:
            return line.recv(4096).decode(errors="replace")
    except OSError as error:
        return ""

for port in ports:
    found["said"][port] = talk(port)
for port in ports:
    pid = os.fork()
    if pid == 0:
        use_as_store(port)
    if os.waitpid(pid, 0)[1] == 0:
        found["store"].append(port)
for file in files:
    try:
        os.listdir(file) if os.path.isdir(file) else open(file).close()
        found["files"][file] = "opened"
    except OSError as error:
        found["files"][file] = type(error).__name__
print(json.dumps(found))
"""


@pytest.fixture
def lockstep(lockstep: Lockstep) -> Iterator[Lockstep]:
    """The command in a directory that all users may enter."""
    lockstep.directory = Path(tempfile.mkdtemp(dir="/tmp"))
    lockstep.directory.chmod(0o755)
    yield lockstep
    lockstep.close()
    shutil.rmtree(lockstep.directory)


def listeners(pid: int) -> dict[int, list[psutil._common.addr]]:
    """Return where a launcher, under its process id, and what it has started listen."""
    launcher = psutil.Process(pid)
    return {
        one.pid: [
            link.laddr
            for link in one.net_connections("inet")
            if link.status == psutil.CONN_LISTEN or link.type.name == "SOCK_DGRAM"
        ]
        for one in (launcher, *launcher.children(recursive=True))
    }


def as_another_user(ports: list[int], files: list[Path]) -> Any:
    words = json.dumps([ports, list(map(str, files))])
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, words],
        capture_output=True,
        timeout=60,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.ranks(2)
def test_another_user_reaches_no_store_no_secret_and_no_record(lockstep: Lockstep) -> None:
    lockstep.script(RUN)
    words = ("--run-dir", "run", "--servers", "1", "--strategy", "ps")
    launcher = lockstep.start("run", "-n", "2", *words, "--start", "spawn", "train.py")
    ranks = [int(pid) for pid in lockstep.wait_for("here-0", "here-1")]
    found = listeners(launcher.pid)
    assert {place.ip for places in found.values() for place in places} == {"127.0.0.1"}
    assert found[launcher.pid] == [], "the launcher hosts no store"
    assert [len(found[pid]) for pid in ranks] == [1, 1], "Gloo's"
    ports = [place.port for places in found.values() for place in places]
    assert len(ports) == 3

    store = Path(psutil.Process(ranks[0]).environ()["LOCKSTEP_STORE"])
    run = lockstep.directory / "run"
    files = [run / "run.json", run / "events", run / "events" / "rank-0.jsonl"]
    files += [store, store.parent, *(Path(f"/proc/{pid}/environ") for pid in ranks)]
    assert all(file.exists() for file in files)
    reached = as_another_user(ports, [*files, lockstep.directory / "train.py"])
    assert reached["store"] == []
    said = [text for text in reached["said"].values() if text]
    assert len(said) == 1
    assert all('"nonce"' in text for text in said), "a server asks for a proof, and no more"
    opened = reached["files"]
    assert opened.pop(str(lockstep.directory / "train.py")) == "opened", "it may enter"
    assert set(opened.values()) == {"PermissionError"}

    lockstep.script("1", "go")
    done = lockstep.finish(launcher)
    assert done.code == 0, done.err
    (lockstep.directory / "run").rename(lockstep.directory / "disturbed")
    alone = lockstep("run", "--run-dir", "run", "train.py")
    assert done.out.split("digest=")[1] == alone.out.split("digest=")[1]


@pytest.mark.wide
@pytest.mark.ranks(2)
def test_the_store_of_a_script_without_a_run_is_open_as_under_torchrun(lockstep: Lockstep) -> None:
    lockstep.script(PLAIN)
    launcher = lockstep.start("run", "-n", "2", "train.py")
    lockstep.wait_for("here-0", "here-1")
    (place,) = listeners(launcher.pid)[launcher.pid]
    assert place.ip == "127.0.0.1"
    assert as_another_user([place.port], [])["store"] == [place.port]
    lockstep.script("1", "go")
    assert lockstep.finish(launcher).code == 0
