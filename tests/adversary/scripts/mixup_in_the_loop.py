"""Mixup by hand: NumPy draws lambda, torch a permutation, both inside the loop."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("mixup", seed=14, replicas=4) as run:
    labels = torch.randint(0, 4, (100,))
    train = run.loader(
        TensorDataset(torch.randn(100, 10) + labels[:, None], labels), batch_size=20, shuffle=True
    )
    model = run.model(
        nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    )
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _epoch in run.epochs(4):
        for x, y in train:
            lam = np.random.beta(0.4, 0.4)
            order = torch.randperm(len(x))
            logits = model(lam * x + (1 - lam) * x[order])
            loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[order])
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
