"""Uncertainty by dropout in evaluation, which sets the learning rate; the model stays in training mode."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("mc", seed=26, replicas=4) as run:
    x = torch.randn(80, 5)
    data = TensorDataset(x, x.prod(1).gt(0).long())
    train = run.loader(data, batch_size=16, shuffle=True)
    test = run.loader(data, batch_size=32)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 2))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for epoch in run.epochs(4):
        for inputs, labels in train:
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            spread = run.mean(
                torch.stack([model(inputs).softmax(1)[:, 0] for _ in range(5)]).std(0)
                for inputs, _ in test
            )
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, spread / 0.05)
        run.print(f"epoch {epoch}: spread {spread:.4f}")
