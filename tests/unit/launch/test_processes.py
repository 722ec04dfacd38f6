"""Processes that cannot be ended, since a call to the system does not return: nothing waits for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lockstep.launch.agent import processes
from lockstep.launch.agent.child import Child, LostError
from lockstep.launch.agent.forkserver import ForkRequest, ForkServer
from lockstep.launch.devices import gpus
from tests.frozen import frozen_disk


def state(pid: int) -> str:
    """Return how a process is: D in a call that cannot be interrupted, Z ended, empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def await_state(pid: int, *wanted: str) -> None:
    deadline = time.monotonic() + 10
    while state(pid) not in wanted:
        assert time.monotonic() < deadline, state(pid)
        time.sleep(0.01)


def test_a_tool_that_hangs_in_the_driver_is_given_up_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpus, "_TIMEOUT", 0.5)
    tool = tmp_path / "nvidia-smi"
    with frozen_disk(tmp_path) as disk:
        tool.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho 1 > {disk}/device\n")
        tool.chmod(0o755)
        assert gpus.list_gpus(str(tool)).problem == "nvidia-smi -L did not answer within 0.5 s"
        pid = int((tmp_path / "pid").read_text())
        assert state(pid) == "D"
    processes.reap(pid, 10)


def test_a_child_that_hangs_in_the_driver_is_given_up_on(tmp_path: Path) -> None:
    with frozen_disk(tmp_path) as disk:
        child = Child(lambda _: (disk / "device").write_text("1")).give(None)
        with pytest.raises(LostError, match=r"no answer within 0\.5 s"):
            child.result(0.5)
        assert state(child.pid) == "D"
    processes.reap(child.pid, 10)


def test_a_fork_server_ends_although_a_worker_cannot(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("lockstep.launch.agent.forkserver._KILL_SECONDS", 0.5)
    with frozen_disk(tmp_path) as disk, Path(os.devnull).open("r+") as nothing:

        def job(_: ForkRequest) -> None:
            (disk / "device").write_text("1")

        server = ForkServer(job)  # type: ignore[arg-type]
        pid = server.start(ForkRequest(rank=0, local_rank=0, env={}), [nothing.fileno()] * 3)
        await_state(pid, "D")
        server.close()
        assert state(server._pid) == ""
        assert state(pid) == "D"
    await_state(pid, "", "Z")
