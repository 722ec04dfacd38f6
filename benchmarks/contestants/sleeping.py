"""Train a model whose computing is a sleep in proportion to samples: each rank has a processor of its own.

Gradients are real, and so is their exchange. A layer sleeps in its forward pass, and twice as long in its
backward pass, so that buckets fill one after the other, as those of a network do.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.size = seconds, weight.numel()
        time.sleep(seconds / 3)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, gradient.mean().expand(ctx.size).contiguous(), None


class Layer(nn.Module):
    """So many parameters, and so many seconds for each sample."""

    def __init__(self, parameters: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, and return something of the shape of `x`."""
        out: torch.Tensor = _Sleep.apply(x, self.weight, len(x) * self.seconds)
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=1_000_000, help="of all layers")
    parser.add_argument("--sample", type=float, default=0.005, help="seconds of all layers")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    with lockstep.Run("sleeping", seed=0, progress=False, threads=1) as run:
        each = options.parameters // options.layers, options.sample / options.layers
        model = run.model(nn.Sequential(*(Layer(*each) for _ in range(options.layers))))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        data = TensorDataset(torch.zeros(options.batch * options.steps, 1))
        for (x,) in run.loader(data, batch_size=options.batch):
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
