"""Two hosts joined by 100 Mbit/s: what crosses the link, by exchange."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.hosts import Hosts

pytestmark = pytest.mark.ranks(2)

#: 20 steps of a model of 0.4 million parameters, 1.6 MB.
SCRIPT = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

with lockstep.Run("link", progress=False, exact=False) as run:
    model = run.model(nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 64)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)
    data = run.loader(TensorDataset(torch.randn(160, 600, generator=generator)), batch_size=8)
    for (x,) in data:
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
MODEL = 4 * (600 * 600 + 600 + 600 * 64 + 64)
STEPS = 20


def megabytes(hosts: Hosts, directory: Path, *flags: str, ranks: int = 1) -> tuple[float, float]:
    """Train over a slow link; return what the main host has sent, in models, and the seconds it took."""
    (directory / "train.py").write_text(SCRIPT)
    made = hosts.lan(2)
    for host in made:
        host.slow("100mbit")
    before, began = made[0].sent(), time.monotonic()
    place = ("--nnodes", "2", "-n", str(ranks), "--master-addr", made[0].name)
    started = [
        host.start(
            *(sys.executable, "-m", "lockstep", "run", *place, "--node-rank", str(rank)),
            *(*flags, "train.py"),
            cwd=directory,
            env={"OMP_NUM_THREADS": "1"},
        )
        for rank, host in enumerate(made)
    ]
    done = hosts.finish(started)
    assert f"lockstep: finished steps={STEPS} " in done[0].out
    return (made[0].sent() - before) / MODEL, time.monotonic() - began


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("flags", "least", "most"),
    [
        # Half of each model goes out to be summed, and half of the sum: one model per step and rank.
        (("--exchange", "tree"), STEPS, STEPS * 1.25),
        (("--exchange", "bf16"), STEPS / 2, STEPS * 0.7),
        # Ten steps as they are, then products of rank 4; here an all-reduce sends as much as the tree.
        (("--exchange", "powersgd"), STEPS / 2, STEPS * 0.7),
        # Meetings after 8 and 16 steps and at the end, and the weights that all begin with.
        (("--strategy", "local-sgd", "--sync-every", "8"), 3, 6),
        (("--strategy", "diloco"), 1, 3.5),
    ],
    ids=["tree", "bf16", "powersgd", "local-sgd", "diloco"],
)
def test_what_crosses_the_link(
    hosts: Hosts, tmp_path: Path, flags: tuple[str, ...], least: float, most: float
) -> None:
    sent, seconds = megabytes(hosts, tmp_path, *flags)
    assert least < sent < most
    if least == STEPS:
        assert seconds > STEPS * MODEL / 12.5e6, "the link is as slow as it is said to be"


@pytest.mark.ranks(4)
def test_two_ranks_of_a_host_send_no_more_than_one(hosts: Hosts, tmp_path: Path) -> None:
    sent, _ = megabytes(hosts, tmp_path, "--exchange", "tree", ranks=2)
    assert STEPS < sent < STEPS * 1.25
