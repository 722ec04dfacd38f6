"""Training for a number of steps, not epochs: the loop is left by run.step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

MAX_STEPS = 17

with lockstep.Run("steps", seed=3, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(10):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if run.step >= MAX_STEPS:
                break
        if run.step >= MAX_STEPS:
            break
    assert run.step == MAX_STEPS
