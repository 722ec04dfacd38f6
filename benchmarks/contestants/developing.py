"""A person at work on a script: it does a few steps on two ranks, and has a bug if asked.

Each process writes the time of every completed step to a file, and that of the bug before it raises.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS = 32, 40


class Marks:
    """Writes what happened, and when.

    Args:
        path: where.
        bug: the step of rank 1 that fails; 0 for none.
    """

    def __init__(self, path: Path, bug: int) -> None:
        self._path, self._bug = path, bug

    def write(self, what: str) -> None:
        """Add a line; short lines of several processes don't mix."""
        with self._path.open("a") as file:
            file.write(f"{time.time()!r} {what}\n")

    def compute(self, step: int, rank: int) -> None:
        """Do what a script does besides; here is the bug."""
        if rank == 1 and step == self._bug:
            self.write("bug")
            raise KeyError("labels")  # the line that is looked for: BUG


def make() -> tuple[TensorDataset, nn.Module]:
    """Return data and model."""
    data = TensorDataset(torch.randn(2 * BATCH * STEPS, 64), torch.zeros(2 * BATCH * STEPS).long())
    return data, nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def by_hand(marks: Marks) -> None:
    """Train as torchrun's and spawn's users do."""
    dist.init_process_group("gloo")
    data, module = make()
    model = nn.parallel.DistributedDataParallel(module)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(loader, start=1):
        marks.compute(step, dist.get_rank())
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.write("step")
    dist.destroy_process_group()


def with_accelerate(marks: Marks) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data, module = make()
    made = module, torch.optim.SGD(module.parameters(), lr=0.01), DataLoader(data, BATCH)
    model, optimizer, loader = accelerator.prepare(*made)
    for step, (inputs, labels) in enumerate(loader, start=1):
        marks.compute(step, accelerator.process_index)
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        marks.write("step")
    accelerator.end_training()


def with_lockstep(marks: Marks) -> None:
    """Train with Lockstep."""
    import lockstep

    with lockstep.Run("developing") as run:
        data, module = make()
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        loader = run.loader(data, batch_size=2 * BATCH)
        for step, (inputs, labels) in enumerate(loader, start=1):
            marks.compute(step, run.world.rank)
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            marks.write("step")


def spawned(rank: int, marks: Marks, port: str) -> None:
    """Be one of the processes that `torch.multiprocessing.spawn` starts."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    by_hand(marks)


def with_spawn(marks: Marks) -> None:
    """Start two processes, at a port that is free now."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torch.multiprocessing.spawn(spawned, args=(marks, port), nprocs=2)


def main() -> None:
    ways = {
        "hand": by_hand,
        "accelerate": with_accelerate,
        "lockstep": with_lockstep,
        "spawn": with_spawn,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=ways)
    parser.add_argument("marks", type=Path)
    parser.add_argument("--bug", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways[options.way](Marks(options.marks, options.bug))


if __name__ == "__main__":
    main()
