"""A loader that is made anew in every epoch, over a dataset that grows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep

with lockstep.Run("growing", seed=3, replicas=3) as run:
    x = torch.randn(96, 4)
    data = TensorDataset(x, x.norm(dim=1, keepdim=True))
    model = run.model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    for epoch in run.epochs(4):
        easiest = Subset(data, range(24 * (epoch + 1)))
        for inputs, targets in run.loader(easiest, batch_size=12, shuffle=True):
            optimizer.zero_grad()
            run.backward(F.l1_loss(model(inputs), targets))
            optimizer.step()
