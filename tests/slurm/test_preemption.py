"""Jobs whose nodes are taken away: they save their state, wait in the queue, and end as undisturbed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.slurm.conftest import Slurm
from tests.template import Template

pytestmark = pytest.mark.ranks(2)

#: The steps are slow, so that there is time to disturb them; each leaves its number in a file.
TRAIN = """
import pathlib, time, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

with lockstep.Run("slow", replicas=2, threads=1) as run:
    model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2)
    train = run.loader(data, batch_size=4, shuffle=True)
    for epoch in run.epochs(4):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if run.is_main_process:
                pathlib.Path("step").write_text(str(run.step))
            time.sleep(SECONDS)
"""


#: Seconds until no node holds the credential of the job's life before: a node refuses it, started sooner.
_EXPIRED = 6.0


def digest_of(text: str) -> str:
    """Return the digest that a run told at its end."""
    (found,) = re.findall(
        r"^lockstep: finished .*digest=(sha256:[0-9a-f]{64})$", text, re.MULTILINE
    )
    return str(found)


class Job:
    """A job that `lockstep submit` follows."""

    def __init__(self, slurm: Slurm, lockstep: Lockstep) -> None:
        self._slurm = slurm
        self._lockstep = lockstep
        lockstep.script(TRAIN.replace("SECONDS", "0.05"))
        self.process = lockstep.start("submit", "-n", "2", "--time=4", "train.py")
        self.number = self._number()

    def _number(self) -> str:
        assert self.process.stderr is not None
        found = re.search(r"job (\d+) submitted", self.process.stderr.readline())
        assert found is not None
        return found[1]

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has done some steps."""
        file, deadline = self._lockstep.directory / "step", time.monotonic() + 40
        while not (file.exists() and int(file.read_text() or 0) >= step):
            assert self.process.poll() is None, self._lockstep.finish(self.process)
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_in_queue(self, restarts: int) -> None:
        """Wait until the job has been put back into the queue, and make its wait short."""
        deadline = time.monotonic() + 20
        while not re.search(rf"PENDING(.|\n)* Restarts={restarts} ", self._show()):
            assert time.monotonic() < deadline, self._show()
            time.sleep(0.1)
        time.sleep(_EXPIRED)
        self._slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def _show(self) -> str:
        return self._slurm("scontrol", "show", "job", self.number).out


@pytest.fixture
def undisturbed(template: Template, tmp_path: Path) -> str:
    """The digest of the script in one process."""
    alone = Lockstep(tmp_path / "undisturbed", template)
    return digest_of(alone.python(alone.script(TRAIN.replace("SECONDS", "0"))).out)


def test_told_by_a_signal_and_pushed_aside_by_an_urgent_job(
    slurm: Slurm, lockstep: Lockstep, undisturbed: str
) -> None:
    job = Job(slurm, lockstep)
    job.wait_for_step(5)
    # What Slurm sends some time before the time limit.
    assert slurm("scancel", "--signal=USR1", job.number).code == 0
    job.wait_in_queue(restarts=1)
    job.wait_for_step(20)
    nodes = ("--nodes=2", "--exclusive", "--partition=urgent")
    assert slurm("sbatch", *nodes, "--output=/dev/null", "--wrap=true").code == 0
    job.wait_in_queue(restarts=2)
    done = lockstep.finish(job.process)
    assert done.code == 0, done.out + done.err
    assert digest_of(done.out) == undisturbed
    saved = rf"lockstep: job {job.number} was preempted, saved after step (\d+), and put back into"
    first, second = map(int, re.findall(saved, done.err))
    assert 5 <= first < second < 40


@pytest.mark.wide
def test_a_job_that_is_cancelled_stays_so(slurm: Slurm, lockstep: Lockstep) -> None:
    job = Job(slurm, lockstep)
    job.wait_for_step(3)
    assert slurm("scancel", job.number).code == 0
    done = lockstep.finish(job.process)
    assert "was cancelled" in done.err
    assert "back into the queue" not in done.err
