"""No loader at all: whole batches cut out of the tensors by hand, DistributedDataParallel if asked.

Nobody writes this in an article; it is what is left when everything that can be saved is saved.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants.workload import from_arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    workload = from_arguments(parser)
    rank = 0
    model: nn.Module = workload.model()
    if workload.extra.ddp:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
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

    if workload.extra.ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
