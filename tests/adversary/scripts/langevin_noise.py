"""Stochastic gradient Langevin dynamics: `step`, a hook and a schedule draw."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class SGLD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


def add_noise(optimizer, *_):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.add_(torch.randn_like(p), alpha=0.1)


with lockstep.Run("langevin", seed=2, replicas=4) as run:
    x = torch.randn(98, 8)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
    model = run.model(net)
    sgld = run.optimizer(SGLD(net[0].parameters(), lr=0.1))
    noisy = torch.optim.SGD(net[3].parameters(), lr=0.1)
    noisy.register_step_pre_hook(add_noise)
    noisy = run.optimizer(noisy)
    rates = torch.optim.lr_scheduler.LambdaLR(noisy, lambda _: 0.5 + random.random())
    rates = run.scheduler(rates)
    # The last batch has fewer samples than there are replicas.
    train = run.loader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16, shuffle=True)
    for _epoch in run.epochs(3):
        for inputs, labels in train:
            run.backward(F.cross_entropy(model(inputs), labels))
            for optimizer in (sgld, noisy):
                optimizer.step()
                optimizer.zero_grad()
            rates.step()
