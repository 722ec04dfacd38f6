"""Gradient checkpointing around blocks with dropout: the second forward must draw what the first drew."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3)) for _ in range(4)
        )
        self.last = nn.Linear(16, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


with lockstep.Run("checkpointed", seed=20, replicas=3) as run:
    model = run.model(Deep())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=5e-3))
    data = TensorDataset(torch.randn(75, 8), torch.randint(0, 2, (75,)))
    train = run.loader(data, batch_size=15, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
