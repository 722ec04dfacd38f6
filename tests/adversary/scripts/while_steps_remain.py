"""A while loop around the loader, counted by run.step; no epochs at all."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

import lockstep

with lockstep.Run("while", seed=3, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(60, 6), torch.randint(0, 3, (60,)))
    train = run.loader(data, batch_size=12, shuffle=True)
    while run.step < 20:
        for x, y in tqdm(train, disable=not run.is_main_process):
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
