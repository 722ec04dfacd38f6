"""What every contestant trains: the same model, data and steps, one epoch per turn.

Contestants of one benchmark run at the same time and take turns: an epoch begins when the parent
says so, and its seconds go back to the parent.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from contestants.turns import Turns
from support import import_torchvision
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.world import detect


@dataclass
class Workload:
    """What to train, and when.

    Attributes:
        model_name: `mlp` or `resnet18`.
        batch: samples per rank and step.
        steps: steps of an epoch.
        epochs: epochs in all, each of which is a turn.
        extra: settings that only some contestants know.
    """

    model_name: str
    batch: int
    steps: int
    epochs: int
    extra: argparse.Namespace
    ranks: int = field(default_factory=lambda: detect().size)

    def __post_init__(self) -> None:
        self._turns = Turns()
        self._done = 0

    def model(self) -> nn.Module:
        """Return the model, for ten classes."""
        if self.model_name == "mlp":
            return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        import_torchvision()
        from torchvision.models import resnet18

        model: nn.Module = resnet18(num_classes=10)
        return model

    def data(self) -> TensorDataset:
        """Return an epoch's samples of all ranks, in memory."""
        shape = (64,) if self.model_name == "mlp" else (3, 32, 32)
        count = self.batch * self.steps * self.ranks
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(count, *shape, generator=generator)
        return TensorDataset(inputs, torch.randint(10, (count,), generator=generator))

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(model.parameters(), lr=0.01)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the parent's word, and tell it how long the body took."""
        if self._turns.wait() is None:
            raise SystemExit("the benchmark is over before its time")
        started = time.perf_counter()
        yield
        self._turns.done(time.perf_counter() - started)
        self._done += 1
        if self._done == self.epochs:
            self._turns.wait()  # taking a process down would disturb whose turn it still is


def from_arguments(parser: argparse.ArgumentParser | None = None) -> Workload:
    """Return the workload that the command line describes.

    Args:
        parser: knows what this contestant alone understands.
    """
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--model", default="mlp", choices=("mlp", "resnet18"))
    for name in ("--batch", "--steps", "--epochs"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    return Workload(options.model, options.batch, options.steps, options.epochs, options)
