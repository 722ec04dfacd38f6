"""The loops that users write by hand today, on Lockstep's order and keys and nothing else of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import ShuffledOrder
from lockstep.engine.layout.replicas import share
from lockstep.engine.training.digest import digest
from lockstep.world import groups
from tests.distributed.jobs import classes, conv_net

SEED, BATCH, SAMPLES, EPOCHS = 3, 16, 48, 2


def batches(replica: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One replica's shares of all global batches, each under the key of its forward pass."""
    images, labels = classes(SAMPLES, (1, 8, 8)).tensors
    for epoch in range(EPOCHS):
        order = ShuffledOrder(SAMPLES, keys.derive(SEED, keys.ORDER, 0, epoch, 0))
        for step in range(SAMPLES // BATCH):
            part = share(BATCH, replicas, replica)
            indices = torch.from_numpy(
                order(step * BATCH, (step + 1) * BATCH)[part.start : part.stop]
            )
            set_key(keys.derive(SEED, keys.FORWARD, 0, epoch, 0, step, replica, 0))
            yield images[indices], labels[indices]


def train(model: nn.Module, net: nn.Module, replica: int, replicas: int) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(replica, replicas):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return digest([net.state_dict()])


def build() -> nn.Module:
    torch.set_num_threads(1)
    set_key(keys.derive(SEED, keys.INIT))
    return conv_net()


def plain_single() -> str:
    """One process, no wrapper: what a first tutorial shows."""
    net = build()
    return train(net, net, 0, 1)


def plain_ddp() -> str:
    """DistributedDataParallel over Gloo, as its own tutorial shows it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    net = build()
    model = DistributedDataParallel(net)
    train(model, net, dist.get_rank(), dist.get_world_size())
    # DDP broadcasts rank 0's buffers before the next forward pass; here is none, so it is asked for.
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)
    result = digest([net.state_dict()])
    groups.keep(dist.group.WORLD)  # what every Lockstep run does; see there
    dist.destroy_process_group()
    return result
