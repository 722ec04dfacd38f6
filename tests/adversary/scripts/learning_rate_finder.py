"""A learning rate finder: weights are kept, tried on, and put back before the training proper."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("finder", seed=28, replicas=3) as run:
    x = torch.randn(60, 6)
    data = TensorDataset(x, x.argmax(1))
    train = run.loader(data, batch_size=12, shuffle=True)
    model = run.model(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    kept = copy.deepcopy(model.state_dict())
    losses = []
    for trial in range(2):
        optimizer.param_groups[0]["lr"] = 10.0 ** (trial - 2)
        for inputs, labels in train:
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(run.mean(F.cross_entropy(model(a), b) for a, b in train))
    model.load_state_dict(kept)
    optimizer.param_groups[0]["lr"] = 10.0 ** (losses.index(min(losses)) - 2)
    for _epoch in run.epochs(3):
        for inputs, labels in train:
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
