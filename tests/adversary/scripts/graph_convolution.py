"""A graph network on the whole graph: the loader gives node numbers, the loss is taken over these."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class GCN(nn.Module):
    def __init__(self, adjacency):
        super().__init__()
        degree = adjacency.sum(1).rsqrt()
        self.register_buffer("a", adjacency * degree[:, None] * degree, persistent=False)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = F.dropout(F.relu(self.a @ self.first(x)), 0.5, self.training)
        return self.a @ self.second(hidden)


with lockstep.Run("graph", seed=24, replicas=3) as run:
    edges = (torch.rand(60, 60) > 0.93).float()
    adjacency = ((edges + edges.T + torch.eye(60)) > 0).float()
    features, labels = torch.randn(60, 6), torch.arange(60) % 3
    nodes = run.loader(TensorDataset(torch.arange(60)), batch_size=12, shuffle=True)
    model = run.model(GCN(adjacency))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4))
    for _epoch in run.epochs(4):
        for (node,) in nodes:
            loss = F.cross_entropy(model(features)[node], labels[node])
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
