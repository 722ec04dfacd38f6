"""The learning rate is written into the parameter groups by a function of the step."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

STEPS = 24


def learning_rate(step):
    if step < 4:
        return 0.1 * (step + 1) / 4
    return 0.05 * (1 + math.cos(math.pi * (step - 4) / (STEPS - 4)))


with lockstep.Run("by-hand", seed=3, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(7, 14), nn.LeakyReLU(), nn.Linear(14, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(96, 7), torch.randint(0, 2, (96,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run.step)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
