"""A physics-informed network: derivatives of the output by the input are part of the loss, in float64."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.set_default_dtype(torch.float64)

with lockstep.Run("pinn", seed=13, replicas=4) as run:
    points = torch.linspace(0, 3, 80)[:, None]
    train = run.loader(TensorDataset(points), batch_size=20, shuffle=True)
    model = run.model(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for (t,) in train:
            t = t.requires_grad_()
            u = model(t)
            (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            start = model(torch.zeros(1, 1)) - 1
            loss = (du + u).square().mean() + start.square().mean()
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
