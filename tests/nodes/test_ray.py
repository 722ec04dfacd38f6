"""Runs on a real Ray cluster of two nodes: by Ray Train, by actors, and by the example."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep

pytestmark = [pytest.mark.wide, pytest.mark.ranks(2)]

ROOT = Path(__file__).parents[2]
JOBS = str(Path(__file__).with_name("ray_jobs.py"))
#: Fewer processes than by default, each at the priority of others: this is a small machine.
SMALL = {
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SECONDS = 600.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Variables by which a script finds the cluster."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray, of the extra `ray`")
    directory = tempfile.mkdtemp(prefix="ray-")  # names of sockets are short
    command = (sys.executable, "-m", "tests.nodes.ray_cluster")
    with subprocess.Popen(
        command,
        cwd=ROOT,
        # Not a `temp_dir` of the head: its address file is in /tmp/ray then, which Ray does not make.
        env={**os.environ, **SMALL, "RAY_TMPDIR": directory},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield {**SMALL, "RAY_ADDRESS": process.stdout.readline().strip()}
        finally:
            process.stdin.close()
            process.wait(60)
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def expected(lockstep: Lockstep) -> str:
    """The digest of two ranks of `lockstep run`."""
    done = lockstep("run", "-n", "2", JOBS, timeout=120)
    assert done.code == 0, done.err
    digest, environment, _ = json.loads(done.out.splitlines()[-1])
    assert environment == "lockstep"
    return str(digest)


def found(lockstep: Lockstep, cluster: dict[str, str], word: str) -> list[object]:
    """Run a job; return what came out."""
    done = lockstep.python(JOBS, word, str(lockstep.directory), env=cluster, timeout=SECONDS)
    assert done.code == 0, done.err
    return list(json.loads(done.out.splitlines()[-1])[word])


def test_ray_train(lockstep: Lockstep, cluster: dict[str, str], expected: str) -> None:
    returned, epochs = found(lockstep, cluster, "train")
    assert returned == [expected, "ray", 0]
    assert epochs == [0, 1, 2, 3]
    record = json.loads((lockstep.directory / "train/ray/run.json").read_text())
    assert (record["status"], record["digest"]) == ("finished", expected)


def test_a_killed_worker_resumes(
    lockstep: Lockstep, cluster: dict[str, str], expected: str
) -> None:
    returned, epochs = found(lockstep, cluster, "kill")
    digest, environment, first = returned  # type: ignore[misc]
    assert (digest, environment) == (expected, "ray")
    assert first > 0, "from a checkpoint"
    assert sorted(set(epochs)) == [0, 1, 2, 3]  # type: ignore[type-var]
    record = json.loads((lockstep.directory / "kill/ray/run.json").read_text())
    assert len(record["generations"]) == 2


def test_actors_of_a_placement_group(
    lockstep: Lockstep, cluster: dict[str, str], expected: str
) -> None:
    assert found(lockstep, cluster, "actors") == [[expected, "ray", 0]] * 2


def test_variables_that_are_set_by_half(lockstep: Lockstep, cluster: dict[str, str]) -> None:
    half, inherited = map(str, found(lockstep, cluster, "refusals"))
    assert half.startswith("ray: RANK is set alone; expected RANK and WORLD_SIZE, or neither")
    assert inherited.startswith("ray: this worker has the variable LOCKSTEP_LAUNCHER")


def test_the_example(lockstep: Lockstep, cluster: dict[str, str]) -> None:
    digits = str(ROOT / "examples/digits.py")
    done = lockstep("run", "-n", "2", digits, "--epochs", "1", timeout=120)
    (digest,) = re.findall(r"digest=(sha256:\w{64})", done.out)
    example = str(ROOT / "examples/ray_train.py")
    words = ("--epochs", "1", "--storage", str(lockstep.directory))
    shown = lockstep.python(example, *words, env=cluster, timeout=SECONDS)
    assert re.search(rf"^test accuracy [\d.]+%, digest {digest}$", shown.out, re.MULTILINE), shown
