"""DataParallel from the command line, on a machine without a GPU (A1)."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Lockstep

pytestmark = [
    pytest.mark.forked,
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
]

SCRIPT = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def main():
    with lockstep.Run("small", replicas=2) as run:
        model = run.model(nn.Linear(4, 2), **{keywords})
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(TensorDataset(torch.ones(8, 4)), batch_size=4):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""


def test_without_a_gpu_the_bare_module_runs_and_that_is_said_once(lockstep: Lockstep) -> None:
    script = lockstep.script(SCRIPT.replace("{keywords}", "{}"))
    done = lockstep("run", "--strategy", "dp", script)
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if line.startswith("lockstep: strategy=dp")]
    assert len(said) == 1
    assert "without a GPU: Linear runs as it is" in said[0]
    assert "lockstep: small: exact, 2 replicas on 1 rank, cpu" in done.err


@pytest.mark.parametrize(
    ("ranks", "keywords", "message"),
    [
        ("2", "{}", "strategy=dp with 2 ranks; expected one rank"),
        ("1", "{'device_ids': [0, 1]}", "device_ids=[0, 1] with strategy=dp, and the run computes"),
    ],
)
def test_what_cannot_be(lockstep: Lockstep, ranks: str, keywords: str, message: str) -> None:
    script = lockstep.script(SCRIPT.replace("{keywords}", keywords))
    done = lockstep("run", "-n", ranks, "--strategy", "dp", script)
    assert done.code == 2
    assert message in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err
