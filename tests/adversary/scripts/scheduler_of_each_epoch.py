"""A new scheduler in each epoch: a run that resumes makes those of the epochs to come only."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("schedulers", seed=26, replicas=4) as run:
    model = run.model(nn.Linear(8, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(3):
        schedule = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        for x, y in train:
            model.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        schedule.step()
