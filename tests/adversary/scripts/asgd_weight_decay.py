"""ASGD keeps an average of the weights; the run ends with the averaged weights in the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("asgd", seed=9, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(5, 12), nn.Sigmoid(), nn.Linear(12, 3)))
    optimizer = run.optimizer(torch.optim.ASGD(model.parameters(), lr=0.1, t0=5, weight_decay=1e-3))
    data = TensorDataset(torch.randn(100, 5), torch.randint(0, 3, (100,)))
    loader = run.loader(data, batch_size=20, shuffle=True)
    for _epoch in run.epochs(5):
        for x, y in loader:
            loss = F.multi_margin_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(optimizer.state[p]["ax"])
