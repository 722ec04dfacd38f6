"""No loader at all: whole batches cut out of the tensors by hand, DistributedDataParallel if asked.

Nobody writes this in an article; it is what is left when everything that can be saved is saved.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants.workload import from_arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, library: str) -> nn.Module:
    """Wrap `model`, with gradients that meet over Gloo, or by an all-reduce of MPI."""
    if library == "gloo":
        dist.init_process_group("gloo")
        return DistributedDataParallel(model)
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    place = f"file://{Path.cwd() / 'rendezvous'}"
    dist.init_process_group("gloo", place, rank=everyone.rank, world_size=everyone.size)
    replicated = DistributedDataParallel(model)

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer().div_(everyone.size)
        everyone.Allreduce(MPI.IN_PLACE, gradients.numpy())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future

    replicated.register_comm_hook(None, hook)
    return replicated


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", nargs="?", choices=("gloo", "mpi"), const="gloo")
    parser.add_argument(
        "--barrier", action="store_true", help="wait for the other ranks after each step"
    )
    workload = from_arguments(parser)
    rank = 0
    model: nn.Module = workload.model()
    if workload.extra.ddp:
        model = replicate(model, workload.extra.ddp)
        rank = dist.get_rank()
    elif workload.extra.barrier:
        dist.init_process_group("gloo")
    inputs, labels = workload.data().tensors
    optimizer = workload.optimizer(model)

    for epoch in range(workload.epochs):
        generator = torch.Generator().manual_seed(epoch)
        with workload.turn():
            order = torch.randperm(len(labels), generator=generator)[rank :: workload.ranks]
            for index in order.split(workload.batch):
                optimizer.zero_grad()
                output = model(inputs.index_select(0, index))
                loss = F.cross_entropy(output, labels.index_select(0, index))
                loss.backward()
                optimizer.step()
                if workload.extra.barrier:
                    dist.barrier()

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
