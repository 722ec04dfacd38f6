"""A Siamese network: one model called twice, a contrastive loss, pairs drawn with NumPy."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Pairs(Dataset):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.images = rng.normal(size=(60, 1, 8, 8)).astype(np.float32)
        self.labels = np.arange(60) % 4

    def __len__(self):
        return 60

    def __getitem__(self, index):
        wanted = np.random.rand() < 0.5
        choices = np.flatnonzero((self.labels == self.labels[index]) == wanted)
        other = np.random.choice(choices)
        pair = torch.from_numpy(self.images[index]), torch.from_numpy(self.images[other])
        return *pair, torch.tensor(float(wanted))


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc = nn.Linear(54, 8)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


with lockstep.Run("siamese", seed=9, replicas=4) as run:
    train = run.loader(Pairs(), batch_size=12, shuffle=True, num_workers=2)
    model = run.model(Embedder())
    optimizer = run.optimizer(torch.optim.RMSprop(model.parameters(), lr=1e-3))
    for _epoch in run.epochs(4):
        for left, right, same in train:
            distance = F.pairwise_distance(model(left), model(right))
            loss = (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
