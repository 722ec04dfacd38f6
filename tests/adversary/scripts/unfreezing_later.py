"""Unfreezing by requires_grad after run.model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("later", seed=20, replicas=4) as run:
    body, head = nn.Linear(8, 24), nn.Linear(24, 3)
    model = run.model(nn.Sequential(body.requires_grad_(False), nn.ReLU(), head))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for epoch in run.epochs(2):
        if epoch >= 1:
            body.requires_grad_(True)
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
