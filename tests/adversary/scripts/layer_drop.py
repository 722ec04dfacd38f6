"""Stochastic depth by Python's random: which layers run differs between microbatches."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.4:
                continue
            x = x + F.relu(layer(x))
        return self.out(x)


with lockstep.Run("layerdrop", seed=30, replicas=4) as run:
    data = TensorDataset(torch.randn(80, 10), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    model = run.model(Dropped())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
