"""run.clip_grad_value_ between backward and step, under Adam with a tensor for its learning rate."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("run-clip-value", seed=18, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05)))
    data = TensorDataset(torch.randn(80, 6) * 3, torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            run.clip_grad_value_(model, 0.01)
            optimizer.step()
