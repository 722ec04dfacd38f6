"""Gradual unfreezing: the body joins the optimizer in the third epoch, by add_param_group."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("unfreeze", seed=20, replicas=4) as run:
    body, head = nn.Sequential(nn.Linear(8, 24), nn.ReLU()), nn.Linear(24, 3)
    model = run.model(nn.Sequential(body, head))
    optimizer = run.optimizer(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for epoch in run.epochs(4):
        if epoch >= 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": body.parameters(), "lr": 0.02})
        for x, y in train:
            model.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
