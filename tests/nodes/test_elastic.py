"""Launches that go on when a worker, a cable or a node is gone (A6, A8, B1, B3, B4, B7)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, Hosts, Switch, wait_until

pytestmark = [pytest.mark.forked, pytest.mark.ranks(3)]

#: Notes who is in each generation and the digest after each step, until it is told to stop or has made
#: as many steps as it is asked for.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.utils.data import TensorDataset
import lockstep

def write(name, text):
    draft = Path(f"{name}.draft")
    draft.write_text(text)
    draft.rename(name)

def ends(run):
    if len(sys.argv) > 1:
        return run.step == int(sys.argv[1])
    time.sleep(0.02)
    told = torch.tensor([int(run.is_main_process and Path("stop").exists())])
    if run.world.size > 1:
        dist.all_reduce(told)
    return bool(told)

with lockstep.Run("elastic", threads=1, progress=False) as run:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (96,), generator=generator)
    data = TensorDataset(torch.randn(96, 4, generator=generator), labels)
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
    model = run.model(torch.nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = run.loader(data, batch_size=16, shuffle=True)
    generation, rank = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), run.world.rank
    note = {
        "generation": generation, "rank": rank, "pid": os.getpid(), "host": os.uname().nodename,
        "replicas": run.replicas, "size": run.world.size,
    }
    write(f"notes/{generation}-{rank}", json.dumps(note))
    over = False  # an epoch that a restart goes on with may have no batch left
    for _ in run.epochs(100_000):
        for batch in run.batches(loader):
            for x, y in batch:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            digest = run.digest()
            if run.is_main_process:
                write("step", f"{run.step} {digest}")
            if over := ends(run):
                break
        if over:
            break
"""


@dataclass
class Site:
    """Hosts that share a directory, and the nodes that run there."""

    directory: Path
    hosts: dict[str, Host]
    switch: Switch

    def start(self, name: str, *flags: str) -> subprocess.Popen[str]:
        """Start a node on a host."""
        words = ("run", "--max-restarts", "3", "--run-dir", "run", *flags, "train.py")
        return self.hosts[name].start(
            *(sys.executable, "-m", "lockstep", *words),
            cwd=self.directory,
            env={"OMP_NUM_THREADS": "1"},
        )

    def await_world(self, names: str) -> list[dict[str, Any]]:
        """Wait until the newest generation has its ranks on these hosts; return what they note."""
        newest: list[dict[str, Any]] = []

        def is_there() -> bool:
            files = [one for one in (self.directory / "notes").iterdir() if not one.suffix]
            notes = [json.loads(file.read_text()) for file in files]
            last = max((note["generation"] for note in notes), default=0)
            newest[:] = [note for note in notes if note["generation"] == last]
            return sorted(note["host"] for note in newest) == sorted(names)

        wait_until(is_there, f"{names} did not come to a generation")
        assert {note["size"] for note in newest} == {len(names)}
        assert sorted(note["rank"] for note in newest) == list(range(len(names)))
        return sorted(newest, key=lambda note: str(note["host"]))

    def kill(self, name: str, process: subprocess.Popen[str]) -> None:
        """Kill a node: all that runs there, at once."""
        inside = subprocess.run(
            ["ip", "netns", "pids", self.hosts[name].namespace],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        )
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):  # a worker ends with its launcher
                os.kill(int(pid), signal.SIGKILL)
        process.communicate(timeout=10)

    @property
    def step(self) -> int:
        """What the first rank has come to."""
        return self.reached()[0]

    def reached(self) -> tuple[int, str]:
        """What the first rank has come to, and the digest there."""
        file = self.directory / "step"
        step, digest = file.read_text().split() if file.exists() else ("0", "")
        return int(step), digest

    def undisturbed(self, steps: int, replicas: int) -> str:
        """Return the digest after `steps` steps of one process that nothing happens to."""
        done = subprocess.run(
            [sys.executable, "train.py", str(steps)],
            cwd=self.directory,
            env={**os.environ, "LOCKSTEP_REPLICAS": str(replicas), "LOCKSTEP_RUN_DIR": "alone"},
            capture_output=True,
            text=True,
            check=True,
        )
        return digest_of(done.stdout, steps)


@pytest.fixture
def site(hosts: Hosts, tmp_path: Path) -> Site:
    """Three hosts on one switch."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("notes", "rendezvous"):
        (tmp_path / name).mkdir()
    made = {name: hosts.host(name) for name in "abc"}
    switch = hosts.switch()
    hosts.plug_all(switch, list(made.values()))
    return Site(tmp_path, made, switch)


def digest_of(out: str, steps: int) -> str:
    """Return what the last line of a run says."""
    (found,) = re.findall(rf"finished steps={steps} seconds=\S+ digest=(sha256:\w+)", out)
    return str(found)


@pytest.mark.wide
def test_a_killed_worker_a_cable_out_for_a_while_and_for_ever(hosts: Hosts, site: Site) -> None:
    flags = ("--nnodes", "2", "--master-addr", "a", "--node-rank")
    started = [site.start(name, *flags, f"{rank}") for rank, name in enumerate("ab")]
    before = site.await_world("ab")
    os.kill(before[1]["pid"], signal.SIGKILL)
    wait_until(lambda: site.await_world("ab") != before, "no second generation")
    after = site.await_world("ab")
    assert [note["generation"] for note in after] == [1, 1], (
        "ranks of both nodes were started again"
    )

    site.switch.cut(site.hosts["b"])
    time.sleep(10)
    site.switch.mend(site.hosts["b"])
    step = site.step
    wait_until(lambda: site.step > step + 1, "it does not go on")
    assert site.await_world("ab") == after, "nothing was started again"

    site.switch.cut(site.hosts["b"])
    cut = time.monotonic()
    done = hosts.finish(started, code=1)
    assert time.monotonic() - cut < 30
    reached, digest = site.reached()
    assert reached > step
    assert site.undisturbed(reached, replicas=2) == digest
    assert "node 1 (b) was lost" in done[0].err
    assert "node 0 (a) was lost" in done[1].err
    assert all("restart 1" in one.err for one in done)


@pytest.mark.wide
def test_nodes_come_and_go_and_the_first_is_lost_for_good(hosts: Hosts, site: Site) -> None:
    rendezvous = f"file://{site.directory}/rendezvous"
    flags = ("--nnodes", "1:3", "--last-call", "4", "--rdzv-endpoint", rendezvous)
    first = site.start("a", *flags)
    wait_until(lambda: any((site.directory / "rendezvous").iterdir()), "it does not come")
    nodes = {"a": first, "b": site.start("b", *flags)}
    notes = site.await_world("ab")
    assert [note["rank"] for note in notes] == [0, 1]
    assert {note["replicas"] for note in notes} == {3}, "as many as there may ever be ranks"

    wait_until(lambda: site.step >= 10, "it does not train")
    nodes["c"] = site.start("c", *flags)
    site.await_world("abc")
    grown = site.step
    assert grown >= 10
    wait_until(lambda: site.step > grown + 5, "it does not go on")
    site.kill("b", nodes["b"])
    site.await_world("ac")
    site.kill("a", nodes["a"])
    assert site.await_world("c")[0]["rank"] == 0

    nodes["b"] = site.start("b", *flags)
    site.await_world("bc")
    nodes["b"].send_signal(signal.SIGTERM)
    site.await_world("c")
    (site.directory / "stop").touch()
    (left,) = hosts.finish([nodes["b"]], code=128 + signal.SIGTERM)
    (stayed,) = hosts.finish([nodes["c"]])
    assert "stopped by SIGTERM" in left.err
    assert "b comes" in stayed.err
    # Not the digest in the file: where a restart goes on behind an epoch, its last batch is computed again,
    # and the script has noted what the state was before it came back.
    steps, _ = site.reached()
    assert digest_of(stayed.out, steps) == site.undisturbed(steps, replicas=3)
    assert list((site.directory / "rendezvous").iterdir()) == [], "nothing stays"
