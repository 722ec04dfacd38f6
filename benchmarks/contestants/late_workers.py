"""Train a perceptron whose workers are late by turns, and print the time of a step.

Started by `lockstep run`, which names strategy and staleness. A late worker sleeps, in the place of
computing on a slower or busier machine.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

_WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", choices=("none", "one", "turns"), default="none")
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    count = options.steps + _WARM_UP
    with lockstep.Run("late", replicas=2, progress=False, threads=1) as run:
        width, own = options.width, run.world.rank
        layers = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        model = run.model(nn.Sequential(*layers, nn.Linear(width, 10)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        data = TensorDataset(torch.randn(64 * count, 64), torch.arange(64 * count) % 10)
        ends: list[float] = []
        for number, (x, y) in enumerate(run.loader(data, batch_size=64)):
            # Two batches each, so that both are late equally often.
            turn = number // 2 % run.world.size
            if options.late != "none" and own == (1 if options.late == "one" else turn):
                time.sleep(options.milliseconds / 1000)
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        told = {"ms": 1000 * (ends[-1] - ends[_WARM_UP - 1]) / options.steps}
        run.print(f"told: {json.dumps(told)}")


if __name__ == "__main__":
    main()
