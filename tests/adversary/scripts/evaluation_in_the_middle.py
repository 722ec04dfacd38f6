"""Evaluation every few steps in the middle of an epoch, which reduces the learning rate."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("middle", seed=27, replicas=4) as run:
    x = torch.randn(120, 6)
    data = TensorDataset(x, x.norm(dim=1).gt(2.4).long())
    train = run.loader(data, batch_size=16, shuffle=True)
    test = run.loader(data, batch_size=60)
    model = run.model(
        nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
    )
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _epoch in run.epochs(3):
        for batch in run.batches(train):
            for inputs, labels in batch:
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
            if run.step % 5 == 0:
                model.eval()
                with torch.no_grad():
                    accuracy = run.mean(model(a).argmax(1) == b for a, b in test)
                model.train()
                optimizer.param_groups[0]["lr"] = 0.1 * (1.2 - accuracy)
