"""Adamax, and CyclicLR per batch; the last batch of each epoch is short."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("cyclic", seed=21, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(9, 18), nn.Mish(), nn.Linear(18, 3)))
    optimizer = run.optimizer(torch.optim.Adamax(model.parameters(), lr=0.01))
    scheduler = run.scheduler(
        torch.optim.lr_scheduler.CyclicLR(
            optimizer, base_lr=0.001, max_lr=0.02, step_size_up=5, cycle_momentum=False
        )
    )
    data = TensorDataset(torch.randn(82, 9), torch.randint(0, 3, (82,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for epoch in run.epochs(4):
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            scheduler.step()
        run.print(f"{epoch}: {run.step} steps, lr {scheduler.get_last_lr()[0]:.4f}")
