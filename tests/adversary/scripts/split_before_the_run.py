"""random_split without a seed, before the run is made: where most scripts prepare their data."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import lockstep

generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(
    torch.randn(100, 4, generator=generator), torch.randint(0, 2, (100,), generator=generator)
)
train_set, test_set = random_split(dataset, [80, 20])

with lockstep.Run("prepared", seed=0, replicas=4) as run:
    train = run.loader(train_set, batch_size=16, shuffle=True)
    model = run.model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _epoch in run.epochs(4):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
