"""One model held in one of Lockstep's ways, or in one of PyTorch's own by hand; see strategies.py.

Each turn is an epoch of a few steps; the parent says whether it is timed or its memory is looked at.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants.turns import RankOrder
from support import import_torchvision
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.layout.classes import EXACTNESS
from lockstep.world import detect

#: What the parent may ask for; see `answer`.
TIME, MEMORY, CLASS = range(3)
_LOOK_SECONDS = 0.002
Step = Callable[[torch.Tensor, torch.Tensor], None]


def mlp() -> nn.Sequential:
    """Return 10.5 million parameters in four layers; input `(batch, 1024)`."""
    widths = itertools.pairwise([1024, 2048, 2048, 2048, 10])
    layers = [part for a, b in widths for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def resnet18() -> nn.Module:
    """Return torchvision's, for ten classes; input `(batch, 3, 32, 32)`."""
    import_torchvision()
    from torchvision.models import resnet18 as build

    model: nn.Module = build(num_classes=10)
    return model


MODELS = {"mlp": (mlp, (1024,)), "resnet18": (resnet18, (3, 32, 32))}
#: How tensor parallelism cuts the layers of the MLP: columns, then rows, twice.
PLAN = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "4": ColwiseParallel(),
    "6": RowwiseParallel(),
}


def data(model: str, samples: int) -> TensorDataset:
    """Return an epoch's samples of all ranks, in memory."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *MODELS[model][1], generator=generator)
    return TensorDataset(inputs, torch.randint(10, (samples,), generator=generator))


def own_memory() -> int:
    """Return the bytes of this process that belong to no file: its own, and those of shared memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    lines = [line.split() for line in status.splitlines()]
    return sum(1024 * int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


class Peak(threading.Thread):
    """Looks at this process's memory while a turn is on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._over = threading.Event()

    def run(self) -> None:
        """Look until the turn is over."""
        while not self._over.wait(_LOOK_SECONDS):
            self.bytes = max(self.bytes, own_memory())

    def end(self) -> int:
        """Return the most that was seen."""
        self._over.set()
        self.join()
        return max(self.bytes, own_memory())


def answer(turns: RankOrder, exactness: Callable[[], str]) -> Iterator[None]:
    """Yield once for every epoch to train, until the parent has no more turns."""
    before = own_memory()
    while (asked := turns.wait()) is not None:
        if asked == CLASS:
            known = exactness()
            turns.done(float(EXACTNESS.index(known) if known in EXACTNESS else -1))
        elif asked == MEMORY:
            peak = Peak()
            peak.start()
            yield
            turns.done(float(peak.end() - before))
        else:
            started = time.perf_counter()
            yield
            turns.done(time.perf_counter() - started)


def by_lockstep(options: argparse.Namespace) -> None:
    """Train as README.md shows."""
    turns = RankOrder()
    with lockstep.Run(
        "benchmark",
        strategy=options.way,
        exchange=options.exchange,
        exact=not options.inexact,
        threads=1,
        run_dir=options.run_dir,
        progress=False,
        checkpoint_every=0,
    ) as run:
        epochs = answer(turns, lambda: run.exactness)
        next(epochs, None)  # the model is part of what the memory is looked at for
        model = run.model(MODELS[options.model][0](), plan=PLAN)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        train = run.loader(
            data(options.model, options.batch * options.steps),
            batch_size=options.batch,
            shuffle=True,
        )
        for _ in run.epochs(1 << 20):
            for inputs, labels in train:
                run.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
            if next(epochs, StopIteration) is StopIteration:
                break


def by_hand(options: argparse.Namespace) -> None:
    """Train by a loop that cuts its batches out of tensors: as fast as PyTorch goes."""
    turns, world = RankOrder(), detect()
    epochs = answer(turns, lambda: "")
    next(epochs, None)
    model = MODELS[options.model][0]()
    if options.way != "plain":
        dist.init_process_group("gloo")
    if options.way == "plain-ddp":
        model = DistributedDataParallel(model)
    elif options.way == "plain-fsdp":
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    tensors = data(options.model, options.batch * options.steps).tensors
    own = [tensor.chunk(world.size)[world.rank] for tensor in tensors]
    while True:
        for inputs, labels in zip(*(part.chunk(options.steps) for part in own), strict=True):
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if next(epochs, StopIteration) is StopIteration:
            break
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", required=True)
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--batch", type=int, required=True, help="samples of a global batch")
    parser.add_argument("--steps", type=int, required=True, help="of an epoch")
    parser.add_argument("--run-dir")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way.startswith("plain"):
        by_hand(options)
    else:
        by_lockstep(options)


if __name__ == "__main__":
    main()
