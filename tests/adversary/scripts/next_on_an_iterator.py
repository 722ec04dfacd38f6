"""A loop over steps that takes batches with next(), and begins anew when the loader is exhausted."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("next", seed=21) as run:
    model = run.model(nn.Linear(6, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(60, 6), torch.randint(0, 3, (60,)))
    train = run.loader(data, batch_size=12, shuffle=True)
    batches = iter(train)
    while run.step < 20:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(train)
            x, y = next(batches)
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
