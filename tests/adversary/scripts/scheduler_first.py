"""The scheduler steps at the beginning of the epoch, before its loop, as older scripts do."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")

with lockstep.Run("older", seed=34, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    scheduler = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
    data = TensorDataset(torch.randn(60, 6), torch.randint(0, 3, (60,)))
    train = run.loader(data, batch_size=12, shuffle=True)
    for epoch in run.epochs(5):
        scheduler.step()
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        print(epoch, scheduler.get_last_lr())
