"""Binary weights by a straight-through estimator: an autograd function of the script's own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight), self.bias)


with lockstep.Run("binary", seed=23, replicas=4) as run:
    x = torch.randn(96, 10)
    train = run.loader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)
    net = nn.Sequential(
        BinaryLinear(10, 20), nn.BatchNorm1d(20), nn.Hardtanh(), BinaryLinear(20, 3)
    )
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for inputs, labels in train:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-1, 1)
