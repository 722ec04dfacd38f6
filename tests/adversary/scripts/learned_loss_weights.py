"""Multi-task learning: the tasks have weights that are parameters of a second module."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 24)
        self.heads = nn.ModuleDict({"label": nn.Linear(24, 3), "value": nn.Linear(24, 1)})

    def forward(self, x):
        hidden = F.gelu(self.shared(x))
        return {name: head(hidden) for name, head in self.heads.items()}


class Uncertainty(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, losses):
        return (losses * (-self.log_variance).exp() + self.log_variance).sum()


with lockstep.Run("tasks", seed=10, replicas=4) as run:
    x = torch.randn(96, 8)
    data = TensorDataset(x, x.argmax(1) % 3, x.sum(1, keepdim=True))
    train = run.loader(data, batch_size=16, shuffle=True)
    model, balance = run.model(Tasks()), run.model(Uncertainty())
    optimizer = run.optimizer(
        torch.optim.AdamW([*model.parameters(), *balance.parameters()], lr=0.01)
    )
    for _epoch in run.epochs(4):
        for inputs, label, value in train:
            out = model(inputs)
            losses = F.cross_entropy(out["label"], label), F.mse_loss(out["value"], value)
            optimizer.zero_grad()
            run.backward(balance(torch.stack(losses)))
            optimizer.step()
