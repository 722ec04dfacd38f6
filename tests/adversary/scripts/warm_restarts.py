"""CosineAnnealingWarmRestarts per epoch, RAdam, a plain loop that counts epochs with range."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("restarts", seed=0, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(5, 20), nn.Hardswish(), nn.Linear(20, 4)))
    optimizer = run.optimizer(torch.optim.RAdam(model.parameters(), lr=0.01))
    scheduler = run.scheduler(
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    )
    data = TensorDataset(torch.randn(75, 5), torch.randint(0, 4, (75,)))
    train = run.loader(data, batch_size=15, shuffle=True)
    for epoch in range(5):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        print(epoch, scheduler.get_last_lr())
