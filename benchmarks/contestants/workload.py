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
from contestants.turns import RankOrder
from support import import_torchvision
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.world import detect

CLASSES = 10
_MODELS = ("mlp", "resnet18", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large")


class Segmenter(nn.Module):
    """DeepLabV3 without its auxiliary head; gives logits of pixels, shape `(N, classes, H, W)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits of images, shape `(N, 3, H, W)`."""
        logits: torch.Tensor = self.model(images)["out"]
        return logits


@dataclass
class Workload:
    """What to train, and when.

    Attributes:
        model_name: `mlp`, `resnet18`, or one of torchvision's DeepLabV3.
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
        self._turns = RankOrder()
        self._done = 0

    def model(self) -> nn.Module:
        """Return the model, for ten classes."""
        if self.model_name == "mlp":
            return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        import_torchvision()
        from torchvision.models import get_model

        none = {"weights": None, **({"weights_backbone": None} if self.segments else {})}
        model: nn.Module = get_model(self.model_name, num_classes=CLASSES, **none)
        return Segmenter(model) if self.segments else model

    @property
    def segments(self) -> bool:
        """Whether labels are of pixels."""
        return self.model_name.startswith("deeplabv3")

    def data(self) -> TensorDataset:
        """Return an epoch's samples of all ranks, in memory."""
        size = 129 if self.segments else 32
        shape = (64,) if self.model_name == "mlp" else (3, size, size)
        count = self.batch * self.steps * self.ranks
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(count, *shape, generator=generator)
        of_labels = (count, size, size) if self.segments else (count,)
        return TensorDataset(inputs, torch.randint(CLASSES, of_labels, generator=generator))

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
    parser.add_argument("--model", default="mlp", choices=_MODELS)
    for name in ("--batch", "--steps", "--epochs"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    return Workload(options.model, options.batch, options.steps, options.epochs, options)
