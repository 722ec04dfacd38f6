"""What every contestant whose workers get killed trains, and how it tells of its steps.

The digits of `examples/digits.py`: its model, its data, global batches of 64. It goes on until it is
ended. Each rank appends a line to the journal when it begins, and one for every step it has done.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from digits import Net, load
from torch import nn

BATCH = 64
FOREVER = 100_000


class Journal:
    """Appends lines to the file that all ranks of all generations share.

    Args:
        rank: this rank.
        participants: how many ranks do a step.
    """

    def __init__(self, rank: int, participants: int) -> None:
        self._rank, self._participants = rank, participants
        path = os.environ["BENCHMARK_JOURNAL"]
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.done(0)

    def done(self, step: int, participants: int | None = None) -> None:
        """Write that `step` is done; 0 says that this rank has begun."""
        participants = self._participants if participants is None else participants
        line = f"{self._rank} {os.getpid()} {step} {participants} {time.time():.6f}\n"
        os.write(self._file, line.encode())  # one write, so that no two lines mix


def begin(rank: int, participants: int) -> tuple[Journal, Callable[[], None]]:
    """Return the journal, and what makes a step as long as the benchmark wants it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    seconds = parser.parse_args().step_seconds
    torch.set_num_threads(1)
    return Journal(rank, participants), lambda: time.sleep(seconds) if seconds else None


def training_set() -> Any:
    """Return the scans to train on."""
    return load()[0]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return both, new and always the same."""
    torch.manual_seed(0)
    model = Net()
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of `model`."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
