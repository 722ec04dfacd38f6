"""Sine regression with NAdam and ExponentialLR; the loss is SmoothL1, the network has weight norm."""

import math

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import Dataset

import lockstep


class Sine(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        x = torch.tensor([index / 100 * 2 * math.pi])
        return x, torch.sin(x)


with lockstep.Run("sine", seed=0, replicas=4) as run:
    model = run.model(
        nn.Sequential(weight_norm(nn.Linear(1, 32)), nn.Tanh(), weight_norm(nn.Linear(32, 1)))
    )
    optimizer = run.optimizer(torch.optim.NAdam(model.parameters(), lr=0.02))
    scheduler = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9))
    criterion = nn.SmoothL1Loss()
    loader = run.loader(Sine(), batch_size=20, shuffle=True)
    for _ in run.epochs(5):
        for x, y in loader:
            optimizer.zero_grad()
            run.backward(criterion(model(x), y))
            optimizer.step()
        scheduler.step()
