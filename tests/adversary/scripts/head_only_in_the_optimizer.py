"""Freezing by leaving parameters out of the optimizer, without requires_grad."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("head", seed=6, replicas=4) as run:
    body, head = nn.Linear(10, 24), nn.Linear(24, 3)
    model = run.model(nn.Sequential(body, nn.ReLU(), head))
    optimizer = run.optimizer(torch.optim.SGD(head.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(84, 10), torch.randint(0, 3, (84,)))
    train = run.loader(data, batch_size=14, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
