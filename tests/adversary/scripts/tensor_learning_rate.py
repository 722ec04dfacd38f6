"""A learning rate that is a tensor, as compiled optimizers want it, with a scheduler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("tensor-lr", seed=0, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)))
    scheduler = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95))
    data = TensorDataset(torch.randn(80, 6), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
