"""RealNVP: coupling layers with alternating masks, ActNorm that initialises itself from its first batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if self.training and not self.ready:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.ready.fill_(True)
        return (x - self.mean + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        kept, changed = x.flip(1).split(1, 1) if self.flip else x.split(1, 1)
        log_scale, shift = self.net(kept).split(1, 1)
        log_scale = torch.tanh(log_scale)
        return torch.cat([kept, changed * log_scale.exp() + shift], 1), log_scale.squeeze(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ActNorm(), Coupling(False), Coupling(True), ActNorm()])

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return 0.5 * x.square().sum(1) - total


with lockstep.Run("flow", seed=14, replicas=4) as run:
    angle = torch.rand(96) * 6.28
    data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * 2 + torch.randn(96, 2) / 5)
    train = run.loader(data, batch_size=16, shuffle=True)
    model = run.model(Flow())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.005))
    for _epoch in run.epochs(4):
        for (x,) in train:
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
