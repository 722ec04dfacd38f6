"""Early stopping by a validation loss; the best value and the patience are registered."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Patience:
    def __init__(self, limit):
        self.limit, self.best, self.bad = limit, float("inf"), 0

    def is_over(self, value):
        self.bad = 0 if value < self.best - 0.01 else self.bad + 1
        self.best = min(self.best, value)
        return self.bad >= self.limit

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


with lockstep.Run("stopping", seed=2, replicas=4) as run:
    x = torch.randn(120, 6)
    y = x[:, :1] + 0.8 * torch.randn(120, 1)
    train = run.loader(TensorDataset(x[:80], y[:80]), batch_size=16, shuffle=True)
    valid = run.loader(TensorDataset(x[80:], y[80:]), batch_size=40)
    model = run.model(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    patience = run.register("patience", Patience(2))
    for _epoch in run.epochs(30):
        model.train()
        for features, target in train:
            run.backward(F.mse_loss(model(features), target))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = run.mean((model(a) - b).square().squeeze(1) for a, b in valid)
        if patience.is_over(loss):
            break
    run.print(f"stopped after {run.step} steps, best {patience.best:.4f}")
