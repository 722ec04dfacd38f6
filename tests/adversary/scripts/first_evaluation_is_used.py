"""The loss before training is measured first, and scales the loss from then on."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("scaled", seed=1, replicas=4) as run:
    x = torch.randn(80, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = run.model(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    train = run.loader(data, batch_size=16, shuffle=True)
    test = run.loader(data, batch_size=40)

    def evaluate():
        with torch.no_grad():
            return run.mean((model(a) - b).square().squeeze(1) for a, b in test)

    initial = evaluate()
    for epoch in run.epochs(4):
        for inputs, target in train:
            loss = F.mse_loss(model(inputs), target) / initial
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        run.print(f"epoch {epoch}: {evaluate() / initial:.3f} of the initial loss")
