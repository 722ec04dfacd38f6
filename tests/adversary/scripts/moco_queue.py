"""MoCo: a momentum encoder and a queue of keys, both updated between global batches, both registered."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Keys(nn.Module):
    def __init__(self, encoder, size=24, width=8):
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, width), dim=1))


with lockstep.Run("moco", seed=11, replicas=4) as run:
    train = run.loader(TensorDataset(torch.randn(64, 10)), batch_size=16, shuffle=True)
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))
    keys = run.register("keys", Keys(net))
    encoder = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9))

    def gathered(batch):
        with torch.no_grad():
            return run.gather(F.normalize(keys.encoder(x), dim=1) for (x,) in batch)

    for _epoch in run.epochs(4):
        for batch in run.batches(train):
            for (x,) in batch:
                query = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
                with torch.no_grad():
                    positive = F.normalize(keys.encoder(x), dim=1)
                near = (query * positive).sum(1, keepdim=True)
                logits = torch.cat([near, query @ keys.queue.T], 1) / 0.2
                optimizer.zero_grad()
                run.backward(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64)))
                optimizer.step()
            with torch.no_grad():
                for k, q in zip(keys.encoder.parameters(), encoder.parameters(), strict=True):
                    k.lerp_(q, 0.1)
                keys.queue.copy_(torch.cat([gathered(batch), keys.queue])[: len(keys.queue)])
