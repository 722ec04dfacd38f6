"""Open one kind of shuffled order, and print seconds, memory and the cost of an index as JSON."""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.data import Dataset, DistributedSampler

import lockstep
from lockstep.engine.layout.permutation import ShuffledOrder

_BATCH = 64
_CHUNK = 4096  # as many as Lockstep's loader asks for at once
_MANY = 200 * _CHUNK


class Numbers(Dataset[int]):
    """The integers below `length`."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[int]:
        """Return the samples of a whole batch."""
        return indices


def keyed(length: int) -> tuple[float, float]:
    """Lockstep's order by itself."""
    started = time.perf_counter()
    order = ShuffledOrder(length, key=1)
    order(0, _CHUNK)[:_BATCH]
    first = time.perf_counter() - started
    started = time.perf_counter()
    count = min(_MANY, length) // _CHUNK
    for chunk in range(count):
        order(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    return first, (time.perf_counter() - started) / (count * _CHUNK)


def loader(length: int) -> tuple[float, float]:
    """Lockstep's loader, fetching and collating included."""
    with (
        tempfile.TemporaryDirectory() as place,
        lockstep.Run("orders", threads=1, run_dir=f"{place}/run", progress=False) as run,
    ):
        batches = run.loader(Numbers(length), batch_size=_BATCH, shuffle=True)
        started = time.perf_counter()
        several = iter(batches)
        next(several)
        first = time.perf_counter() - started
        started = time.perf_counter()
        count = min(_MANY, length) // _BATCH - 1
        for _ in range(count):
            next(several)
        each = (time.perf_counter() - started) / (count * _BATCH)
        del several
    return first, each


def permuted(length: int) -> tuple[float, float]:
    """All indices at once."""
    started = time.perf_counter()
    torch.randperm(length)[:_BATCH].tolist()
    first = time.perf_counter() - started
    return first, first / length


def sampled(length: int) -> tuple[float, float]:
    """The sampler of the articles' loop, for one rank."""
    started = time.perf_counter()
    indices = iter(DistributedSampler(Numbers(length), num_replicas=1, rank=0))
    for _ in range(_BATCH):
        next(indices)
    first = time.perf_counter() - started
    return first, first / length


KINDS: dict[str, Callable[[int], tuple[float, float]]] = {
    "Lockstep's order": keyed,
    "run.loader": loader,
    "torch.randperm": permuted,
    "DistributedSampler": sampled,
}


def peak_megabytes() -> float:
    """Return the highest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("length", type=int)
    options = parser.parse_args()
    KINDS[options.kind](10_000)  # what is loaded on first use is not the order's
    before = peak_megabytes()
    first, each = KINDS[options.kind](options.length)
    print(json.dumps({"first": first, "memory": peak_megabytes() - before, "each": each}))


if __name__ == "__main__":
    main()
