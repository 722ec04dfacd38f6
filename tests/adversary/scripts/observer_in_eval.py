"""A module that records the range of what it sees, also in eval mode, as observers for quantisation do."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x):
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.min()))
            self.high.copy_(torch.maximum(self.high, x.max()))
        return x


with lockstep.Run("observed", seed=6, replicas=4) as run:
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 2, (96,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    test = run.loader(TensorDataset(torch.randn(60, 6) * 2, torch.zeros(60)), batch_size=20)
    model = run.model(nn.Sequential(nn.Linear(6, 16), Observer(), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _epoch in run.epochs(3):
        model.train()
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            share = run.mean(model(x).argmax(1) == 0 for x, _ in test)
        run.print(f"{share:.3f}")
