"""Mixed precision as PyTorch documents it: autocast and a GradScaler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("amp", seed=0, replicas=2) as run:
    model = run.model(nn.Linear(6, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    train = run.loader(data, batch_size=16)
    for _epoch in run.epochs(2):
        for x, y in train:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            run.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
