"""A mixture of experts with top-1 routing: some experts get no token in some microbatches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Experts(nn.Module):
    def __init__(self, count=4, width=8):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(count)
        )

    def forward(self, x):
        gates = (self.router(x) + torch.randn(len(x), len(self.experts)) / 10).softmax(1)
        weight, choice = gates.max(1)
        out = x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out, gates.mean(0).square().sum()


with lockstep.Run("experts", seed=16, replicas=4) as run:
    x = torch.randn(80, 8)
    train = run.loader(TensorDataset(x, x.sum(1).gt(0).long()), batch_size=16, shuffle=True)
    model = run.model(Experts(), find_unused_parameters=True)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for inputs, labels in train:
            logits, balance = model(inputs)
            optimizer.zero_grad()
            run.backward(F.cross_entropy(logits, labels) + 0.1 * balance)
            optimizer.step()
