"""The plainest classifier: SGD with momentum, a learning rate that falls every second epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.manual_seed(0)
x = torch.randn(120, 10)
dataset = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

with lockstep.Run("mlp", seed=1, replicas=4) as run:
    model = run.model(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
    loader = run.loader(dataset, batch_size=24, shuffle=True)

    for epoch in run.epochs(5):
        for features, labels in loader:
            loss = F.cross_entropy(model(features), labels)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        run.print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.3f}")
