"""Pruning between epochs: torch.nn.utils.prune puts a mask and another parameter into the module."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("pruned", seed=0, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    train = run.loader(data, batch_size=16)
    for epoch in run.epochs(3):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        if epoch == 0:
            prune.l1_unstructured(model[0], "weight", amount=0.3)
