"""Embeddings of all samples by run.gather choose the hard negatives of the next epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("mining", seed=33, replicas=3) as run:
    x, labels = torch.randn(60, 8), torch.arange(60) % 5
    indices = run.loader(TensorDataset(torch.arange(60)), batch_size=12, shuffle=True)
    everything = run.loader(TensorDataset(x), batch_size=20)
    model = run.model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        with torch.no_grad():
            embedded = run.gather(model(rows) for (rows,) in everything)
        distance = torch.cdist(embedded, embedded)
        same = labels[:, None] == labels
        positive = (distance * same).argmax(1)
        negative = distance.masked_fill(same, float("inf")).argmin(1)
        for (i,) in indices:
            loss = F.triplet_margin_loss(model(x[i]), model(x[positive[i]]), model(x[negative[i]]))
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
