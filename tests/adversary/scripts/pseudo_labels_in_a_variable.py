"""Self-training: labels of the epoch come from the model as it is when the epoch begins."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("pseudo", seed=36, replicas=3) as run:
    x = torch.randn(60, 6)
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train = run.loader(TensorDataset(torch.arange(60)), batch_size=12, shuffle=True)
    for _epoch in run.epochs(4):
        with torch.no_grad():
            soft = (model(x) + torch.randn(60, 3)).softmax(1)
        for (rows,) in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x[rows]), soft[rows]))
            optimizer.step()
