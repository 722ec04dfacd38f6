"""ReduceLROnPlateau on the mean training loss of the epoch, as the manual computes it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("plateau", seed=0, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    scheduler = run.scheduler(
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    )
    x = torch.randn(60, 6)
    train = run.loader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=12, shuffle=True)

    def train_epoch():
        for features, target in train:
            loss = F.mse_loss(model(features), target)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    for epoch in run.epochs(6):
        mean_loss = run.mean(train_epoch())
        scheduler.step(mean_loss)
        run.print(epoch, mean_loss, optimizer.param_groups[0]["lr"])
