"""LBFGS evaluates the loss several times per step, by a closure."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("lbfgs", replicas=2) as run:
    model = run.model(nn.Linear(3, 1))
    optimizer = run.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5))
    x = torch.randn(32, 3)
    loader = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    for _epoch in run.epochs(2):
        for inputs, targets in loader:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs), targets)
                run.backward(loss)
                return loss

            optimizer.step(closure)
