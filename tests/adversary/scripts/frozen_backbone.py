"""Fine-tuning: a frozen backbone with BatchNorm in eval mode, and a new head that the optimizer has."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


with lockstep.Run("tune", seed=6, replicas=4) as run:
    model = FineTuned()
    for p in model.backbone.parameters():
        p.requires_grad = False
    model = run.model(model)
    optimizer = run.optimizer(torch.optim.Adam(model.head.parameters(), lr=0.02))
    data = TensorDataset(torch.randn(84, 10), torch.randint(0, 3, (84,)))
    train = run.loader(data, batch_size=14, shuffle=True)
    for _epoch in run.epochs(4):
        model.train()
        model.backbone.eval()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
