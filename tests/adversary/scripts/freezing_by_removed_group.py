"""The bias is frozen in the second epoch, by taking its group and its state out of the optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("freeze", seed=25, replicas=4) as run:
    model = run.model(nn.Linear(8, 3))
    groups = [{"params": model.weight}, {"params": model.bias}]
    optimizer = run.optimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for epoch in run.epochs(4):
        if epoch == 1:
            del optimizer.param_groups[1]
            optimizer.state.pop(model.bias, None)
        for x, y in train:
            model.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
