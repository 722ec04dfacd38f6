"""Rank 0 alone writes pretrained weights, and draws random numbers for them; data is drawn afterwards."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("drawn", seed=17, replicas=4) as run:
    if run.is_main_process:
        torch.save(nn.Linear(8, 3).state_dict(), "pretrained.pt")
    run.barrier()
    net = nn.Linear(8, 3)
    net.load_state_dict(torch.load("pretrained.pt", weights_only=True))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
