"""An endless stream with a shuffle buffer, left after a number of steps per epoch."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import lockstep


class Stream(IterableDataset):
    def __init__(self, count, buffer=16):
        self.count, self.buffer = count, buffer

    def source(self):
        for i in range(self.count):
            x = torch.tensor([float(i % 7), float(i % 11)]) / 10
            yield x, i % 3

    def __iter__(self):
        held = []
        for item in self.source():
            held.append(item)
            if len(held) == self.buffer:
                yield held.pop(random.randrange(len(held)))
        random.shuffle(held)
        yield from held


with lockstep.Run("stream", seed=6, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    train = run.loader(Stream(70), batch_size=12)
    for _epoch in run.epochs(4):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
