"""run.save(best=…) in every epoch, and a save in the middle of one; weights are reset in between."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("saved", seed=8, replicas=3) as run:
    x = torch.randn(60, 4)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True))
    train = run.loader(data, batch_size=12, shuffle=True)
    model = run.model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    for _epoch in run.epochs(4):
        for inputs, target in train:
            optimizer.zero_grad()
            run.backward(F.mse_loss(model(inputs), target))
            optimizer.step()
            if run.step % 4 == 0:
                run.save()
        with torch.no_grad():
            model[-1].weight.mul_(0.9)
            error = run.mean((model(a) - b).abs().squeeze(1) for a, b in train)
        run.save(best=-error)
    run.export("model.pt")
    weights = torch.load("model.pt", weights_only=True)
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
