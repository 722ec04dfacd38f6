"""A scheduler that was not passed through run.scheduler, with a learning rate that is a tensor."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("forgotten", seed=0, replicas=4) as run:
    model = run.model(nn.Linear(6, 3))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    data = TensorDataset(torch.randn(80, 6), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(2):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
