"""RMSprop with a linear warmup followed by a cosine, both per batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("warmup", seed=2) as run:
    model = run.model(nn.Sequential(nn.Linear(4, 20), nn.ELU(), nn.Linear(20, 2)))
    optimizer = run.optimizer(torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True))
    scheduler = SequentialLR(
        optimizer,
        [LinearLR(optimizer, start_factor=0.1, total_iters=6), CosineAnnealingLR(optimizer, 18)],
        milestones=[6],
    )
    scheduler = run.scheduler(scheduler)
    x = torch.randn(72, 4)
    train = run.loader(TensorDataset(x, x[:, :2].abs()), batch_size=12, shuffle=True)
    for epoch in run.epochs(4):
        for inputs, targets in train:
            loss = F.smooth_l1_loss(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.print(epoch, scheduler.get_last_lr())
