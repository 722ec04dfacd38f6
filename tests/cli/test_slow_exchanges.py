"""`lockstep run` with exchanges and strategies for slow links, and in fp16."""

from __future__ import annotations

import pytest

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

SCRIPT = """
import torch, lockstep
from torch.utils.data import TensorDataset

with lockstep.Run("slow") as run:
    model = run.model(torch.nn.Linear(3, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in run.loader(TensorDataset(torch.arange(24.0).view(8, 3) / 24), batch_size=2):
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    run.print(run.exchange, run.exactness, run.scale)
"""


@pytest.mark.ranks(2)
def test_flags(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    words = ("--no-exact", "--strategy", "diloco", "--sync-every", "2", "--precision", "bf16")
    done = lockstep("run", "-n", "2", *words, "train.py")
    assert done.code == 0, done.err
    assert "tree approximate 1.0\n" in done.out
    assert "lockstep: slow: approximate, 2 replicas on 2 ranks, cpu, exchange tree" in done.err
    assert "lockstep: strategy diloco: parameters are averaged every 2 steps\n" in done.err
    assert "finished steps=4 " in done.out


@pytest.mark.ranks(2)
def test_keywords_without_effect_are_named(lockstep: Lockstep) -> None:
    """But not those for PowerSGD, which scripts may pass with every exchange."""
    keywords = (
        "torch.nn.Linear(3, 2), bucket_cap_mb=1, matrix_approximation_rank=2, static_graph=True"
    )
    lockstep.script(SCRIPT.replace("torch.nn.Linear(3, 2)", keywords))
    done = lockstep("run", "-n", "2", "--no-exact", "--strategy", "diloco", "train.py")
    assert done.code == 0, done.err
    told = "lockstep: strategy diloco: no effect of bucket_cap_mb, static_graph: no gradients are summed\n"
    assert done.err.count(told) == 1


def test_fp16(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "--precision", "fp16", "train.py")
    assert done.code == 0, done.err
    assert "none exact 65536.0\n" in done.out


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("--strategy", "local-sgd"),
            1,
            "strategy=local-sgd trains by other mathematics than one process",
        ),
        (
            ("--strategy", "local-sgd", "--no-exact", "--precision", "fp16"),
            2,
            "precision=fp16 with strategy=local-sgd",
        ),
        (
            ("--exchange", "powersgd", "--no-exact", "--precision", "fp16"),
            2,
            "precision=fp16 with exchange=powersgd",
        ),
        (
            ("--strategy", "ddp", "--sync-every", "8"),
            2,
            "sync_every is 8 with strategy=ddp, whose ranks synchronize in every step",
        ),
        (("--sync-every", "0"), 2, "--sync-every is 0; expected at least 1"),
        (("--sync-every", "often"), 2, "argument --sync-every: invalid int value: 'often'"),
    ],
)
def test_what_cannot_work(
    lockstep: Lockstep, words: tuple[str, ...], code: int, message: str
) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "-n", "2", *words, "train.py")
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err
