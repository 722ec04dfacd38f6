"""nn.Embedding(max_norm=…) changes its weights in the forward pass."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("max-norm", seed=0, replicas=4) as run:
    net = nn.Sequential(nn.Embedding(30, 8, max_norm=1.0), nn.Flatten(), nn.Linear(40, 2))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    data = TensorDataset(torch.randint(0, 30, (80, 5)), torch.randint(0, 2, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(3):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
