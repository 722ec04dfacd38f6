"""Lazy layers: nn.LazyLinear learns its width from the first batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("lazy", seed=0, replicas=2) as run:
    model = run.model(nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3)))
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    train = run.loader(data, batch_size=16)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _epoch in run.epochs(2):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
