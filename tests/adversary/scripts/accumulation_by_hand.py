"""Gradient accumulation as every tutorial writes it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

ACCUMULATE = 2

with lockstep.Run("accumulate", seed=0, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(2):
        for i, (x, y) in enumerate(train):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            run.backward(loss)
            if (i + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
