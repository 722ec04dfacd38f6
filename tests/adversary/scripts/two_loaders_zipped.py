"""Semi-supervised: a labelled and an unlabelled loader, zipped."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("semi", seed=0, replicas=4) as run:
    model = run.model(nn.Linear(6, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    labelled = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    first = run.loader(labelled, batch_size=8, shuffle=True)
    second = run.loader(TensorDataset(torch.randn(64, 6)), batch_size=16, shuffle=True)
    for _epoch in run.epochs(2):
        for (x, y), (u,) in zip(first, second, strict=True):
            consistency = F.mse_loss(model(u + 0.1 * torch.randn_like(u)), model(u).detach())
            run.backward(F.cross_entropy(model(x), y) + consistency)
            optimizer.step()
            optimizer.zero_grad()
