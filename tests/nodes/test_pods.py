"""Runs whose pods are killed, evicted, preempted, or come and go: one digest, on all kinds of jobs."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.state.checkpoint import catalog
from tests.hosts import Hosts
from tests.pods import Cluster

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

KINDS = ("job", "jobset", "trainjob", "pytorchjob")
STEPS = 60
#: Notes the number of steps that are done, before each step.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
import lockstep

with lockstep.Run("pods", replicas=2, threads=1, progress=False, checkpoint_every=2) as run:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (96,), generator=generator)
    data = TensorDataset(torch.randn(96, 4, generator=generator), labels)
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
    model = run.model(torch.nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = run.loader(data, batch_size=16, shuffle=True)
    for _ in run.epochs(10):
        for batch in run.batches(loader):
            if len(sys.argv) > 1:
                if run.is_main_process:
                    with open(sys.argv[1], "a") as file:
                        file.write(f"{time.time()} {run.step} {run.world.size}\\n")
                time.sleep(0.1)
            for x, y in batch:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
"""


class Site:
    """A volume with the script, and the steps that its main rank has noted."""

    def __init__(self, directory: Path, hosts: Hosts, output: Callable[[], str]) -> None:
        self.directory, self._hosts, self._output = directory, hosts, output
        (directory / "train.py").write_text(SCRIPT)

    def cluster(
        self, kind: str, *flags: str, count: int | None = None, apart: Path | None = None
    ) -> Cluster:
        """Return the pods of what `lockstep submit` prints."""
        volume = f"claim:{apart or self.directory}"
        own = ("--image", "i", "--memory", "4Gi", "--volume", volume)
        words = (
            "--kubernetes",
            kind,
            *own,
            "--nodes",
            "2",
            "--job-name",
            "t",
            "--save-before",
            "20",
        )
        assert main(["submit", *words, *flags, "train.py", "steps"]) == 0
        manifests = list(yaml.safe_load_all(self._output()))
        return Cluster(self._hosts, manifests, self.directory, count, apart)

    def steps(self) -> list[tuple[float, int, int]]:
        """Return time, step and number of ranks of each step that was made."""
        file = self.directory / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(float(when), int(step), int(size)) for when, step, size in map(str.split, lines)]

    def reached(self, step: int, size: int = 2) -> Callable[[], bool]:
        """Return a condition: a step was made by this number of ranks."""
        return lambda: any(one[1] >= step and one[2] == size for one in self.steps())

    def more(self, size: int) -> Callable[[], bool]:
        """Return a condition: two further steps were made, by this number of ranks."""
        now = len(self.steps())
        return lambda: [one[2] for one in self.steps()[now:]].count(size) >= 2

    def lost(self) -> int:
        """Return how many steps were done and had to be done again."""
        numbers = [step for _, step, _ in self.steps()]
        return sum(max(0, before - after) for before, after in itertools.pairwise(numbers))

    def saved(self) -> bool:
        """Return whether the volume has a complete checkpoint."""
        return bool(catalog.paths(self.directory / "runs/t/checkpoints"))

    def sources(self) -> list[str]:
        """Return where each start after the first had its state from: `memory` or a checkpoint."""
        record = json.loads((self.directory / "runs/t/run.json").read_text())
        return [one["source"] for one in record["generations"][1:]]

    def pause(self) -> float:
        """Return the longest time between two steps, in seconds."""
        times = [when for when, _, _ in self.steps()]
        return max(after - before for before, after in itertools.pairwise(times))

    def assert_digest(self) -> None:
        """Compare the run with one of a single process that nothing happens to."""
        record = json.loads((self.directory / "runs/t/run.json").read_text())
        assert record["digest"] == undisturbed()
        assert self.steps()[-1][1] == STEPS - 1


@functools.cache
def undisturbed() -> str:
    """Return the digest of one process that nothing happens to."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=directory,
            capture_output=True,
            text=True,
            check=True,
        )
    (digest,) = re.findall(r"digest=(sha256:\w+)", done.stdout)
    return str(digest)


@pytest.fixture
def site(tmp_path: Path, hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> Site:
    return Site(tmp_path, hosts, lambda: capsys.readouterr().out)


def _of_kinds(*, first: bool = True) -> pytest.MarkDecorator:
    cases = [
        pytest.param(kind, marks=[] if first and kind == "job" else pytest.mark.wide)
        for kind in KINDS
    ]
    return pytest.mark.parametrize("kind", cases)


def _report(site: Site, fault: str, kind: str) -> None:
    """Append a row of the manual's table to the file that `LOCKSTEP_TESTS_TABLE` names."""
    if name := os.environ.get("LOCKSTEP_TESTS_TABLE"):
        sources = " ".join(source.rpartition("/")[2] for source in site.sources())
        with Path(name).open("a") as file:
            file.write(f"| {fault} | {kind} | {site.pause():.1f} | {site.lost()} | {sources} |\n")


@_of_kinds()
def test_a_pod_that_is_killed_is_replaced_while_the_other_keeps_the_state(
    site: Site, kind: str
) -> None:
    with site.cluster(kind) as cluster:
        cluster.run(site.reached(12))
        cluster.kill(1)
        cluster.run(site.more(size=1))
        cluster.run(site.more(size=2))
        assert cluster.run() == "Complete"
    _report(site, "kill", kind)
    assert cluster.failures == 1
    assert set(site.sources()) == {"memory"}, "the other pod held the state"
    site.assert_digest()


@_of_kinds()
def test_a_pod_that_is_evicted_counts_as_no_failure(site: Site, kind: str) -> None:
    with site.cluster(kind) as cluster:
        cluster.run(site.reached(12))
        cluster.evict(1)
        cluster.run(site.more(size=1))
        cluster.run(site.more(size=2))
        assert cluster.run() == "Complete"
    _report(site, "evict", kind)
    index, code, err = cluster.ended[0]
    assert (index, code) == (1, 143)
    assert "stopped by SIGTERM" in err
    assert (cluster.failures, cluster.replaced) == (0, 1)
    assert set(site.sources()) == {"memory"}
    site.assert_digest()


@_of_kinds()
def test_a_job_that_is_preempted_saves_its_state_and_resumes(site: Site, kind: str) -> None:
    with site.cluster(kind) as cluster:
        cluster.run(site.reached(12))
        cluster.preempt()
        cluster.run(lambda: len(cluster.ended) == 2)
        cluster.run(site.more(size=2))
        assert cluster.run() == "Complete"
    _report(site, "preempt", kind)
    assert [code for _, code, _ in cluster.ended[:2]] == [75, 75]
    assert all("preempted after step" in err for _, _, err in cluster.ended[:1])
    assert cluster.failures == (2 if kind == "pytorchjob" else 0)
    assert site.lost() == 0
    site.assert_digest()


def test_pods_come_and_go(site: Site) -> None:
    with site.cluster("job", count=1) as cluster:
        cluster.run(site.reached(6, size=1), seconds=120)
        cluster.resize(2)
        cluster.run(site.more(size=2))
        cluster.resize(1)
        cluster.run(site.more(size=1))
        assert cluster.run() == "Complete"
    _report(site, "resize", "job")
    assert set(site.sources()) == {"memory"}
    site.assert_digest()


@pytest.mark.parametrize(
    ("flags", "failures"),
    [
        ((), 2),
        pytest.param(("--rdzv-endpoint", "file://{}/meet"), 1, marks=pytest.mark.wide),
    ],
    ids=["host", "directory"],
)
def test_the_first_pod_is_killed(site: Site, flags: tuple[str, ...], failures: int) -> None:
    (site.directory / "meet").mkdir()
    with site.cluster("job", *(flag.format(site.directory) for flag in flags)) as cluster:
        cluster.run(site.saved)
        done = len(site.steps())
        cluster.kill(0)
        cluster.run(site.more(size=2))
        assert cluster.run() == "Complete"
    _report(site, f"kill pod 0, {'directory' if flags else 'host'}", "job")
    assert cluster.failures == failures, "the other pod ends too, if pod 0 has the rendezvous"
    assert site.lost() < done, "a checkpoint or a snapshot was there"
    site.assert_digest()


def test_a_volume_that_pods_do_not_share_is_named(site: Site) -> None:
    volume = site.directory / "volume"
    volume.mkdir()
    with site.cluster("job", "--min-nodes", "2", apart=volume) as cluster:
        cluster.run(site.reached(1))
        cluster.kill(0)
        cluster.run(lambda: any(index == 0 for index, _, _ in cluster.ended))
    (told,) = [text for index, _, text in cluster.ended if index == 0]
    assert f"warning: {volume}/runs/t is not shared: on node 1 (t-1) it is another" in told


def test_pods_that_do_not_come_are_named(site: Site) -> None:
    with site.cluster("job", "--min-nodes", "2", count=1) as cluster:
        container = cluster.container
        at = container["command"].index("-n")
        container["command"][at:at] = ["--join-timeout", "2"]
        cluster.run(lambda: bool(cluster.ended))
    index, code, told = cluster.ended[0]
    assert (index, code) == (0, 2)
    assert "1 of 2 nodes did not come within 2 s; came: t-0" in told
    assert cluster.failures == 1
