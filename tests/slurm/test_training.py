"""Training in job steps of a real Slurm: the ranks find each other, the digest is that of `python`."""

from __future__ import annotations

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.slurm.conftest import Slurm

pytestmark = pytest.mark.ranks(4)

#: Meets its peer twenty times, each time under another step's number, as if srun had started it anew:
#: importing torch forty times would take a minute.
MEET = """
import os, sys, lockstep
import torch.distributed as dist

def meet(step):
    os.environ["SLURM_STEP_ID"] = str(step)
    with lockstep.Run("meet", progress=False) as run:
        jobs = [None, None]
        dist.all_gather_object(jobs, os.environ["SLURM_JOB_ID"])
    assert jobs == [os.environ["SLURM_JOB_ID"]] * 2, jobs

lockstep.Run
for step in range(20):
    child = os.fork()
    if not child:
        meet(step)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
print("met\\n", end="", flush=True)
"""


@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_three_tasks_on_two_nodes(
    slurm: Slurm,
    lockstep: Lockstep,
    digest_of_python: str,
    servers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if servers:  # rank 0 starts them
        monkeypatch.setenv("LOCKSTEP_STRATEGY", "ps")
        monkeypatch.setenv("LOCKSTEP_SERVERS", str(servers))
    step = slurm.finish(slurm.python("-N2", "-n3", script=lockstep.script(SCRIPT)), timeout=90)
    assert step.code == 0, step.err
    assert digest_of(step.out) == digest_of_python


@pytest.mark.wide
def test_two_jobs_at_once_on_one_node_twenty_times(slurm: Slurm) -> None:
    slurm.directory.joinpath("train.py").write_text(MEET)
    jobs = [slurm.python("-N1", "-w", "n1", "-n2") for _ in range(2)]
    for done in [slurm.finish(job) for job in jobs]:
        assert done.code == 0, done.err
        assert done.out.count("met\n") == 2
