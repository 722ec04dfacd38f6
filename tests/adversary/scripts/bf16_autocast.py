"""Autocast to bf16 in the script, around forward and loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("autocast", seed=19, replicas=4) as run:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(80, 1, 8, 8), torch.randint(0, 4, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
