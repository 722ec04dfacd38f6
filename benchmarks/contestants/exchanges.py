"""The sum of one buffer over all ranks by every exchange, in one set of processes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from contestants.turns import RankOrder
from torch import nn

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest
from lockstep.engine.exchange.choose import make
from lockstep.world import detect


def sum_by(exchange: Exchange, buffer: torch.Tensor) -> None:
    """Sum `buffer` as DDP's hook does for a single bucket, until the sum is in the buffer."""
    slots = exchange.slots(buffer)
    if slots[0].data_ptr() != buffer.data_ptr():
        slots[0].copy_(buffer)
    total = exchange.start(slots, last=True).wait()
    if total.data_ptr() != buffer.data_ptr():
        buffer.copy_(total)


def by_mpi(buffer: torch.Tensor) -> None:
    """Sum `buffer` as a program that uses mpi4py does."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer.numpy())


def case(name: str, buffer: torch.Tensor) -> Callable[[], object]:
    """Return what sums `buffer` by the exchange `name`, or by hand for `gloo` and `allreduce`."""
    if name == "gloo":
        return partial(dist.all_reduce, buffer)
    if name == "allreduce":
        return partial(by_mpi, buffer)
    world = detect()
    store = (
        dist.distributed_c10d._get_default_store() if dist.is_initialized() else dist.HashStore()
    )
    exchange = make(
        ExchangeContext(
            name=name,
            forest=Forest.of(world.size, world.size, world.rank),
            parameters=[nn.Parameter(buffer)],
            group=dist.group.WORLD,
            store=dist.PrefixStore("benchmark", store),
            key=name,
        )
    )
    return partial(sum_by, exchange, buffer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kilobytes", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=1, help="sums of one turn")
    parser.add_argument("--exchanges", nargs="+", required=True)
    options = parser.parse_args()
    if detect().environment == "torchrun":
        dist.init_process_group("gloo")
    torch.set_grad_enabled(False)
    buffer = torch.zeros(options.kilobytes * 1000 // 4)
    cases = [case(name, buffer) for name in options.exchanges]

    turns = RankOrder()
    while (number := turns.wait()) is not None:
        started = time.perf_counter()
        for _ in range(options.repeat):
            cases[number]()
        turns.done((time.perf_counter() - started) / options.repeat)

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
