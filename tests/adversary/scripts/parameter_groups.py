"""No weight decay for biases and norms, another rate for the head, MultiStepLR over all groups."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def groups(model):
    decay, plain, head = [], [], []
    for name, p in model.named_parameters():
        if name.startswith("head"):
            head.append(p)
        elif p.ndim < 2:
            plain.append(p)
        else:
            decay.append(p)
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
        {"params": head, "lr": 0.02, "weight_decay": 0.01},
    ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        return self.head(self.body(x))


with lockstep.Run("groups", seed=13, replicas=3) as run:
    model = run.model(Net())
    optimizer = run.optimizer(torch.optim.AdamW(groups(model), lr=0.005))
    scheduler = run.scheduler(torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.3))
    data = TensorDataset(torch.randn(90, 10), torch.randint(0, 3, (90,)))
    train = run.loader(data, batch_size=18, shuffle=True)
    for _epoch in run.epochs(5):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
