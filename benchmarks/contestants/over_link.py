"""Train an MLP on the digits until 97 % of the scans it has not seen are right; print what it took.

Started on every node by `lockstep run`, which names the exchange; the main rank prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import lockstep

GOAL = 0.97


def load() -> list[TensorDataset]:
    """Return the scans, flat, as a training set and a test set of every fifth part."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    both = TensorDataset(images, torch.tensor(digits.target))
    return list(random_split(both, [0.8, 0.2], generator=torch.Generator().manual_seed(0)))


def sent(interface: str | None) -> int:
    """Return how many bytes have left this host over an interface."""
    if interface is None:
        return 0
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--interface")
    options = parser.parse_args()
    with lockstep.Run("link", seed=0, progress=False, threads=1) as run:
        width = options.width
        layers = (nn.Linear(64, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        model = run.model(nn.Sequential(*layers, nn.Linear(width, 10)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9))
        train_set, test_set = load()
        train = run.loader(train_set, batch_size=64, shuffle=True)
        test = run.loader(test_set, batch_size=256)
        run.barrier()
        began, before, accuracy = time.perf_counter(), sent(options.interface), 0.0
        for _ in run.epochs(options.epochs):
            for x, y in train:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                accuracy = run.mean(model(x).argmax(1) == y for x, y in test)
            if accuracy >= GOAL:
                break
        seconds = time.perf_counter() - began
        told = {
            "seconds": seconds,
            "steps": run.step,
            "bytes": (sent(options.interface) - before) / run.step,
            "accuracy": accuracy,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        run.print(f"told: {json.dumps(told)}")


if __name__ == "__main__":
    main()
